"""The checks that every evaluation runs on itself."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD, AttackResult
from robustdist.core.testing import TinyNet, toy_images
from robustdist.evaluation import RobustTally
from robustdist.evaluation.findings import CHECKS

from .support import NUM_CLASSES, Breaks, Echo, Shifted, attacked, attacks, blind, check, images, tally_of

# --- checks: what must pass


def test_an_honest_evaluation_passes_every_check(task):
    checks = tally_of(attacks(), *task, 16).result().checks
    assert list(checks) == list(CHECKS)[: len(checks)]
    assert list(checks)[:5] == ["budget", "gradient", "logits", "deterministic", "counted_once"]
    assert [name for name, found in checks.items() if not found.passed] == []
    assert checks["counted_once"].detail.startswith("48 samples")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 255.0), None], ids=["unit", "bytes", "no-box"])
def test_honest_linf_attacks_keep_the_budget(bounds, dtype):
    scale = 255.0 if bounds == (0.0, 255.0) else 1.0
    x, y = toy_images(12)
    net = nn.Sequential(TinyNet()).to(dtype)
    net[0].conv.weight.data /= scale
    x = (x * scale).to(dtype)
    attack = PGD(eps=0.1 * scale, steps=2, bounds=bounds)
    with torch.no_grad():
        y = net(x).argmax(1)
    tally = tally_of({"a": attack}, net, x, y)
    assert check(tally, "budget")
    assert attacked(tally) == 12


@pytest.mark.parametrize(("norm", "eps"), [("linf", 4 / 255), ("l2", 3.0), ("l1", 12.0), ("l1", 800.0)])
def test_honest_attacks_keep_the_budget_on_large_images(norm, eps):
    # sums over 150,000 pixels in float32 are not exact
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(1e-3 * torch.randn(3 * 224 * 224, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.weight

    net, x = Large(), torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        y = net(x).argmax(1)
    tally = tally_of({"a": PGD(norm=norm, eps=eps, steps=5)}, net, x, y)
    assert check(tally, "budget"), tally.result().checks["budget"]
    assert attacked(tally) == 2


def test_dropout_and_batch_norm_are_no_randomness():
    net = TinyNet(batch_norm=True, dropout=0.5).train()
    x, y = toy_images(8)
    assert check(tally_of({"a": PGD(eps=0.01, steps=1)}, net, x, y), "deterministic")


# --- checks: what must be found


@pytest.mark.parametrize(
    ("shift", "kwargs"),
    [
        (0.01, {}),
        (-0.01, {"bounds": None}),
        (3e-6, {}),
        (0.01, {"norm": "l2"}),
        (0.03, {"norm": "l1"}),
        (math.nan, {}),
        (math.nan, {"bounds": None}),
        (math.nan, {"norm": "l1", "bounds": None}),
        (math.inf, {}),
        (-math.inf, {"norm": "l2", "bounds": None}),
    ],
    ids=str,
)
def test_a_broken_budget_is_found(shift, kwargs):
    eps = {"linf": 0.02, "l2": 0.04, "l1": 0.05}[kwargs.get("norm", "linf")]
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    for change, passes in ((0.0, True), (shift, False)):
        tally = tally_of({"a": Shifted(change, eps=eps, step_size=1, random_start=False, **kwargs)}, Echo(), x, y)
        assert check(tally, "budget") == passes


def test_one_bad_image_is_enough_and_is_not_forgotten():
    x, y = images([0, 1, 2, 3] * 2), torch.tensor([0, 1, 2, 3] * 2)
    module = Echo()
    shift = torch.zeros(4, NUM_CLASSES)
    shift[2, 1] = 0.05
    cheating, honest = Shifted(shift, eps=0.01), PGD(eps=0.01, steps=1)
    tally = RobustTally({"honest": honest, "cheating": cheating})
    tally.update(module, module, x[:4], y[:4], range(4))
    cheating.shift = 0.0
    tally.update(module, module, x[4:], y[4:], range(4, 8))
    assert not check(tally, "budget")
    assert "5.0e-02" in tally.result().checks["budget"].detail


def test_pixels_outside_the_box_are_found_even_inside_the_ball():
    x, y = images([0, 1]), torch.tensor([0, 1])
    x[0, 0] = 1.0
    for shift, passes in ((0.0, True), (0.1, False)):
        attack = Shifted(shift, eps=0.5, step_size=0.0, random_start=False)
        assert check(tally_of({"a": attack}, Echo(), x, y), "budget") == passes


@pytest.mark.parametrize("bounds", [(0.0, 1.0), None], ids=["box", "no-box"])
def test_images_that_are_no_numbers_are_found_without_a_radius(bounds):
    class Nowhere(Breaks):
        """Searches without a radius, and gets lost."""

        _has_eps = False

        def run(self, *args: Any, **kwargs: Any) -> AttackResult:
            found = super().run(*args, **kwargs)
            x_adv = found.x_adv.clone()
            x_adv[0, 0] = math.nan
            return AttackResult(x_adv, found.no_gradient)

    x, y = images([0, 1]), torch.tensor([0, 1])
    attack = Nowhere(eps=0.0, bounds=bounds)
    assert not check(tally_of({"a": attack}, Echo(), x, y), "budget")


def test_the_budget_is_measured_in_pixels():
    pixels, y = images([0, 1, 2]), torch.tensor([0, 1, 2])
    kwargs = {"eps": 0.02, "step_size": 0.01, "random_start": False, "mean": 0.5, "std": 0.1}
    for shift, passes in ((0.09, True), (0.11, False)):  # times 0.1, added to the step of 0.01
        away = shift * torch.ones(NUM_CLASSES)
        tally = tally_of({"a": Shifted(away, **kwargs)}, Echo(), (pixels - 0.5) / 0.1, y)
        assert check(tally, "budget") == passes


@pytest.mark.parametrize(("num_blind", "passes"), [(0, True), (1, True), (2, False), (100, False)])
def test_missing_gradients_are_found(num_blind, passes):
    class Confident(Echo):
        """So sure of images whose last pixel is white that cross-entropy has no gradient left."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e6 * (x.detach()[:, -1:] > 0.5))

    classes = [row % 3 for row in range(104)]
    x, y = images(classes), torch.tensor(classes)
    x = torch.cat([x, torch.zeros(104, 1)], 1)
    x[:num_blind, -1] = 1.0
    x[100:, -1], y[100:] = 1.0, (y[100:] + 1) % 3  # blind too, but wrong already
    tally = tally_of({"a": PGD(eps=0.01, steps=2), "b": PGD(eps=0.01, steps=1)}, Confident(), x, y, 8)
    assert (attacked(tally), blind(tally)) == (200, 2 * num_blind)
    assert check(tally, "gradient") == passes
    assert tally.result().checks["gradient"].detail.startswith(f"{num_blind:.1f} % ")


def test_only_counted_rows_can_miss_their_gradient():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0])
    module = Echo(factor=1e6)
    tally = RobustTally({"a": PGD(eps=0.01, steps=1)})
    tally.update(module, module, x, y, [0, None, 2, 3], whole_batch=True)
    assert (attacked(tally), blind(tally)) == (2, 2)


def test_probabilities_are_found():
    class Softmax(Echo):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(1)

    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    for module, passes in ((Softmax(), False), (Echo(), True)):
        tally = tally_of({"a": PGD(eps=0.01, steps=1)}, module, x, y, 2)
        assert check(tally, "logits") == passes
        assert tally.result().checks["logits"].detail == f"the model returns {'logits' if passes else 'probabilities'}"


class Random(Echo):
    """A defence that hides behind noise."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        noise = {
            "torch": torch.randn(len(x), NUM_CLASSES),
            "python": torch.tensor(random.random()),
            "count": torch.tensor(1.0 / self.num_forwards),
            "dropout": F.dropout(torch.ones(len(x), NUM_CLASSES), 0.5, training=True),
            "none": torch.tensor(0.5),
        }[self.source]
        return super().forward(x) * (1 + 0.01 * noise)


@pytest.mark.parametrize("source", ["torch", "python", "count", "dropout", "none"])
def test_random_models_are_found(source):
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    tally = tally_of({"a": PGD(eps=0.01, steps=1)}, Random(source), x, y, 2)
    assert check(tally, "deterministic") == (source == "none")
    assert (
        tally.result()
        .checks["deterministic"]
        .detail.startswith(f"5 forward passes of one batch {'agree' if source == 'none' else 'differ'}")
    )


def test_uncertain_sharding_is_found():
    tally = tally_of({"a": Breaks()}, Echo(), images([0]), torch.tensor([0]))
    assert check(tally, "counted_once")
    tally.mark_uncertain()
    assert not check(tally, "counted_once")
