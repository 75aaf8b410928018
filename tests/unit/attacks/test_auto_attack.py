"""AutoAttack: who sees whom, whose word counts, class counts, and agreement with the authors' implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import APGD, PGD, AutoAttack, Square, TokenPGD
from robustdist.attacks.losses import LOSSES
from robustdist.attacks.queue import run_queue
from robustdist.core.testing import run_ranks
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.evaluation import RobustTally

SMALL = {"steps": 6, "queries": 30}
EPS = 0.075


class Watched(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.sizes, self.autocast = net, [], []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return self.net(x)


def test_stages_see_survivors_and_name_who_broke_what(task):
    net, x, y = task.net.double(), task.x.double(), task.y.clone()
    y[3] = (y[3] + 1) % 5  # wrong without attack
    attack = AutoAttack(eps=EPS, **SMALL)
    assert attack.stages == ["apgd-ce", "apgd-t", "fab-t", "square"]
    result = attack.run(net, x, y)
    robust = net(result.x_adv).argmax(1) == y
    stage = result.stage
    assert torch.equal(result.x_adv[3], x[3])
    assert stage[3] == -1
    assert not bool(result.no_gradient.any())
    wrong = ~robust
    wrong[3] = False
    assert torch.equal(stage >= 0, wrong)
    assert 0 < int(robust.sum()) < 9
    # the first stage alone breaks exactly the images it is named for
    first = AutoAttack(eps=EPS, version="custom", attacks=["apgd-ce"], **SMALL).run(net, x, y)
    assert torch.equal(first.stage == 0, stage == 0)
    # images that stand come back as the stages' worst
    margin = LOSSES["margin"]
    assert bool((margin(net(result.x_adv), y) >= margin(net(first.x_adv), y) - 1e-12)[robust].all())


@pytest.mark.parametrize("options", [{"drop": False}, {"batch_size": 3}], ids=str)
def test_verdicts_are_the_same_however_the_work_is_cut(task, options):
    net, x, y = task.net.double(), task.x.double(), task.y
    ids = list(range(10))
    whole = AutoAttack(eps=EPS, **SMALL).run(net, x, y, sample_ids=ids)
    other = AutoAttack(eps=EPS, **SMALL, **options).run(net, x, y, sample_ids=ids)
    assert torch.equal(whole.stage, other.stage)
    order = [4, 9, 1]
    part = AutoAttack(eps=EPS, **SMALL).run(net, x[order], y[order], sample_ids=order)
    assert torch.equal(part.stage, whole.stage[order])


def test_places_of_fallen_images_are_free_for_more_targets(task):
    net, x, y = task
    y = net(x).argmax(1)
    y[:8] = (y[:8] + 1) % 5  # wrong without attack: two images are left, at four targets each
    watched = Watched(net)
    AutoAttack(eps=1e-4, steps=5, version="custom", attacks=["apgd-t"])(watched, x, y)
    assert 8 in watched.sizes


def test_no_batch_is_larger_than_the_callers(task):
    net, x, y = task
    watched = Watched(net)
    AutoAttack(eps=0.03, **SMALL)(watched, x, y)
    assert max(watched.sizes) == 10


@pytest.mark.parametrize("version", ["standard", "plus", "rand", "custom"])
def test_no_forward_pass_is_larger_than_the_batch_size(task, version):
    net = Watched(task.net)
    stages = {"attacks": ["square", PGD(eps=EPS, steps=2), APGD(eps=EPS, steps=2)]} if version == "custom" else {}
    attack = AutoAttack(eps=EPS, version=version, steps=2, queries=5, batch_size=3, **stages)
    cut = attack.run(net, task.x, task.y, sample_ids=list(range(10)))
    assert max(net.sizes) == 3
    attack.batch_size = None
    for stage in attack.attacks:
        stage.batch_size = None
    whole = attack.run(task.net, task.x, task.y, sample_ids=list(range(10)))
    assert torch.equal(cut.stage, whole.stage)


class Chaotic(nn.Module):
    """Answers otherwise as soon as one bit of the image is another."""

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(1)
        angle = (pixels.double() * 2.0**24 * torch.arange(1, pixels.shape[1] + 1)).sum(1) * 0.7 + pixels.mean(1)
        return torch.stack([angle.sin() + 0.9, -angle.sin(), pixels[:, 0] - 3.0, pixels[:, 1] - 3.0], 1).float()


@pytest.mark.parametrize(
    ("dtype", "precision", "units"),
    [
        (torch.float32, "32", {}),
        (torch.float32, "bf16", {"mean": 0.45, "std": 0.22}),
        (torch.bfloat16, "32", {}),
        (torch.float16, "bf16", {"mean": 0.45, "std": 0.22}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.5)])
@pytest.mark.parametrize("stage", ["apgd-ce", "fab", "square"])
def test_the_verdict_is_that_at_the_very_point_that_is_returned(norm, eps, stage, dtype, precision, units, monkeypatch):
    dropped = []

    def watched(problem, engine, **options):
        found = run_queue(problem, engine, **options)
        dropped.append(found.success)
        return found

    for module in ("apgd", "fab", "square"):
        monkeypatch.setattr(f"robustdist.attacks.{module}.run_queue", watched)
    net, x = Chaotic(), torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x = ((x - 0.45) / 0.22 if units else x).to(dtype)
    attack = AutoAttack(
        norm=norm, eps=eps, version="custom", attacks=[stage], precision=precision, steps=8, queries=8, **units
    )
    # pixel units and back is another image already, to this model
    y = net(attack.from_pixels(attack.to_pixels(x), x)).argmax(1)
    result = attack.run(net, x, y)
    broken = net(result.x_adv).argmax(1) != y
    assert torch.equal(result.stage == 0, broken)
    # whatever left the queue because it was broken is broken where it is handed out
    assert not bool((dropped[0] & ~broken).any())
    assert stage == "fab" or int(dropped[0].sum()) > 5


def test_versions_have_the_published_parts():
    plus, rand = AutoAttack(version="plus"), AutoAttack(version="rand")
    assert plus.stages == ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
    assert [getattr(attack, "restarts", None) for attack in plus.attacks] == [5, 5, 5, 1, 1, 1]
    assert rand.stages == ["apgd-ce", "apgd-dlr"]
    assert [attack.eot for attack in rand.attacks] == [20, 20]
    standard = {attack["attack"]: attack for attack in AutoAttack(eps="8/255").settings()["attacks"]}
    assert standard["APGD"]["steps"] == standard["FAB"]["steps"] == 100
    assert standard["FAB"]["n_targets"] == standard["APGD"]["n_targets"] == 9
    assert standard["Square"]["queries"] == 5000
    assert standard["Square"]["rescale"] is False


@pytest.mark.slow
@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
@pytest.mark.parametrize("num_classes", [2, 3, 4])
def test_few_classes(num_classes, version):
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes)).eval()
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(num_classes, 16, generator=generator))
        x = torch.rand(8, 1, 4, 4, generator=generator)
        y = net(x).argmax(1)
    attack = AutoAttack(eps=0.01, version=version, steps=3, queries=10)
    result = attack.run(net, x, y)
    assert int((result.stage == -1).sum()) > 0, "images must survive for later stages to run"
    # what was attacked leaves no trace in the settings, which tell evaluations apart
    assert attack.settings() == AutoAttack(eps=0.01, version=version, steps=3, queries=10).settings()


# --- the cheap search


class LyingInHalf(nn.Module):
    """Wrong about everything in bfloat16, right in float32."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([1 + x.mean((1, 2, 3)), 0.5 * x.mean((1, 2, 3))], 1)
        return -logits if torch.is_autocast_enabled("cpu") else logits


def test_a_success_in_bf16_counts_only_if_float32_agrees():
    x, y = torch.rand(4, 1, 6, 6), torch.zeros(4, dtype=torch.long)
    result = AutoAttack(eps=0.1, precision="bf16", **SMALL).run(LyingInHalf().eval(), x, y)
    assert result.stage.tolist() == [-1] * 4


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"channels_last": True}, {"fold_batch_norm": True, "channels_last": True}],
    ids=str,
)
def test_cheap_searches_find_nearly_the_same(task, options):
    net, x, y = task
    watched = Watched(net)
    exact = AutoAttack(eps=EPS, **SMALL)(net, x, y)
    cheap = AutoAttack(eps=EPS, **SMALL, **options)(watched, x, y)
    robust = [int((net(x_adv).argmax(1) == y).sum()) for x_adv in (exact, cheap)]
    assert abs(robust[0] - robust[1]) <= 1
    assert any(watched.autocast) == ("precision" in options)
    assert not all(watched.autocast)


class Folding(nn.Module):
    """Notes whether its batch norm is folded away; as a liar it then answers something else."""

    def __init__(self, *, lies: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.lies, self.folded = lies, []

    def forward(self, x: Tensor) -> Tensor:
        self.folded.append("forward" in vars(self.norm))
        logits = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return logits.flip(1) if self.lies and self.folded[-1] else logits


def test_batch_norms_are_folded_in_the_search_and_never_in_the_verdict():
    net, x = Folding(lies=False).eval(), torch.rand(4, 1, 6, 6)
    y = net(x).argmax(1)
    expected = AutoAttack(eps=0.1, **SMALL).run(net, x, y)
    assert not any(net.folded)
    result = AutoAttack(eps=0.1, fold_batch_norm=True, **SMALL).run(net, x, y)
    assert torch.equal(result.stage, expected.stage)
    assert sum(net.folded) > 20
    assert not net.folded[-1]  # the verdict
    assert "forward" not in vars(net.norm)


def test_a_fold_that_changes_the_answer_is_not_used():
    net, x = Folding(lies=True).eval(), torch.rand(4, 1, 6, 6)
    y = net(x).argmax(1)
    with pytest.warns(RobustDistWarning, match="batch norm is not folded: logits of the first batch would change"):
        AutoAttack(eps=0.1, fold_batch_norm=True, **SMALL).run(net, x, y)
    assert sum(net.folded) <= 2  # the check


def test_a_model_without_batch_norms_says_that_there_is_nothing_to_fold():
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()
    x, y = torch.rand(4, 1, 6, 6), torch.zeros(4, dtype=torch.long)
    with pytest.warns(RobustDistWarning, match="batch norm is not folded: there is none that uses running statistics"):
        AutoAttack(eps=0.1, fold_batch_norm=True, **SMALL).run(net, x, y)


def test_an_autocast_of_the_callers_does_not_reach_the_verdict():
    x, y = torch.rand(4, 1, 6, 6), torch.zeros(4, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        result = AutoAttack(eps=0.1, **SMALL).run(LyingInHalf().eval(), x, y)
    assert result.stage.tolist() == [-1] * 4


# --- in evaluation


class Centred(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 10
        logits = self.net(x)
        return logits - logits.mean(0)


def test_a_forward_that_reads_the_batch_is_never_cut(task):
    net, x, _ = task
    model = Centred(net).eval()
    y = model(x).argmax(1)
    tally = RobustTally({"aa": AutoAttack(eps=EPS, **SMALL)})
    tally.update(model, model, x, y, range(10), whole_batch=True)
    assert tally.result().num_robust < 10


@pytest.mark.slow
def test_two_processes_count_as_one(task):
    net, x, y = task.net.double(), task.x.double(), task.y
    attack = AutoAttack(eps=EPS, **SMALL)

    def robust(rank: int, world_size: int = 2) -> int:
        rows = list(range(rank, 10, world_size))
        tally = RobustTally({"aa": attack})
        tally.update(net, net, x[rows], y[rows], rows)
        return tally.result().num_robust

    alone = robust(0, 1)
    assert 0 < alone < 10
    assert sum(run_ranks(robust)) == alone


# --- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": "fast"}, "version='fast' is unknown"),
        ({"attacks": ["square"]}, "attacks belongs to version='custom'"),
        ({"version": "custom"}, "attacks belongs to version='custom'"),
        ({"version": "custom", "attacks": []}, "attacks is empty"),
        ({"version": "custom", "attacks": ["cw"]}, "attacks holds 'cw': choose among apgd-ce"),
        ({"version": "custom", "attacks": [PGD(eps=0.2)]}, "attacks holds PGD with"),
        ({"version": "custom", "attacks": [AutoAttack()]}, "cannot be a stage"),
        ({"version": "custom", "attacks": [TokenPGD()], "norm": "l2", "bounds": None}, "TokenPGD"),
        ({"version": "custom", "attacks": [PGD(targeted=True)]}, "targeted PGD"),
        ({"precision": "16"}, "precision='16' is unknown"),
        ({"attack_loss": "ce"}, "losses of its own"),
        ({"model_mode": "train"}, "model_mode"),
        ({"steps": 0}, "steps=0"),
        ({"targeted": True}, "no targeted mode"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(UsageError, match=words):
        AutoAttack(**options)


def test_custom_stages_by_name_and_as_objects(task):
    net, x, y = task
    attacks = ["apgd-dlr", PGD(eps=EPS, steps=5, attack_loss="margin"), Square(eps=EPS, queries=20), "apgd-dlr"]
    attack = AutoAttack(eps=EPS, version="custom", attacks=attacks, **SMALL)
    assert attack.stages == ["apgd-dlr", "pgd", "square", "apgd-dlr#2"]
    result = attack.run(net, x, y)
    assert torch.equal(net(result.x_adv).argmax(1) != y, result.stage >= 0)
    assert [entry["attack"] for entry in attack.settings()["attacks"]] == ["APGD", "PGD", "Square", "APGD"]
    assert isinstance(attack.attacks[0], APGD)
