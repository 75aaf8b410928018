"""APGD against a plain re-derivation for one image, and what the queue may and may not change."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import APGD
from robustdist.attacks.apgd import _APGDEngine, checkpoints
from robustdist.attacks.losses import LOSSES, targeted_dlr
from robustdist.core.rng import Noise, derive_seed
from robustdist.errors import UsageError

STEPS = 30
EPS = {"linf": 0.05, "l2": 0.5}


def loss_of(name: str, logits: Tensor, y: int, target: int | None) -> Tensor:
    """The losses for one image, straight from their definitions."""
    z = logits[0]
    ordered = z.sort(descending=True).values
    if name == "ce":
        return -z.log_softmax(0)[y]
    others = torch.cat([z[:y], z[y + 1 :]])
    if name == "dlr":
        return -(z[y] - others.max()) / (ordered[0] - ordered[2])
    return -(z[y] - z[target]) / (ordered[0] - (ordered[2] + ordered[3]) / 2)


def projected(point: Tensor, x: Tensor, norm: str) -> Tensor:
    delta = point - x
    if norm == "linf":
        delta = delta.clamp(-EPS[norm], EPS[norm])
    elif float(delta.norm()) > EPS[norm]:
        delta = delta * EPS[norm] / delta.norm()
    return (x + delta).clamp(0, 1)


def by_hand(net: nn.Module, x: Tensor, y: int, target: int | None, start: Tensor, norm: str, name: str) -> list[Tensor]:
    """All iterates of one image; Algorithm 1 of the paper, with plain Python control flow."""

    def value(point: Tensor) -> tuple[float, Tensor]:
        leaf = point.clone().requires_grad_()
        loss = loss_of(name, net(leaf), y, target)
        (grad,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), (grad.sign() if norm == "linf" else grad / grad.norm())

    at, before, eta = start, start, 2 * EPS[norm]
    f, direction = value(at)
    best, best_f, best_direction = at, f, direction
    iterates, increases, last = [at], 0, 0
    halved, best_at_last = False, best_f
    for k in range(1, STEPS + 1):
        z = projected(at + eta * direction, x, norm)
        new = z if k == 1 else projected(at + 0.75 * (z - at) + 0.25 * (at - before), x, norm)
        at, before = new, at
        f_new, direction = value(at)
        iterates.append(at)
        increases += f_new > f
        f = f_new
        if f > best_f:
            best, best_f, best_direction = at, f, direction
        if k in (6, 11, 15, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30):
            halve = increases < 0.75 * (k - last) or (not halved and best_f == best_at_last)
            if halve:
                eta /= 2
                at, f, direction = best, best_f, best_direction
            halved, best_at_last, increases, last = halve, best_f, 0, k
    return iterates


class Watched(nn.Module):
    """Keeps every batch on which a gradient is taken or that a run ends with."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.net(x)


@pytest.mark.parametrize("name", ["ce", "dlr", "dlr_targeted"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_iterates_are_those_of_the_paper(task, norm, name):
    net, x, y = task.net.double(), task.x[:3].double(), task.y[:3]
    watched = Watched(net)
    attack = APGD(norm=norm, eps=EPS[norm], steps=STEPS, attack_loss=name, n_targets=2, drop=False, batch_size=3)
    attack(watched, x, y, sample_ids=[5, 6, 7])
    runs = torch.stack(watched.seen[1:])  # the first forward is on the clean images
    groups = 2 if name == "dlr_targeted" else 1
    assert runs.shape[:2] == (groups * (STEPS + 1), 3)
    noise = Noise(0, sample_ids=[5, 6, 7])
    largest = 0.0
    for group in range(groups):
        draw = (noise.uniform if norm == "linf" else noise.normal)(x, "start", group)
        for row in range(3):
            t = 2 * draw[row] - 1 if norm == "linf" else draw[row]
            start = (x[row] + EPS[norm] * t / (t.abs().max() if norm == "linf" else t.norm())).clamp(0, 1)
            order = net(x[row : row + 1])[0].argsort(descending=True).tolist()
            order.remove(int(y[row]))
            expected = by_hand(net, x[row : row + 1], int(y[row]), order[group], start[None], norm, name)
            found = runs[group * (STEPS + 1) : (group + 1) * (STEPS + 1), row]
            largest = max(largest, float((torch.cat(expected) - found).abs().max()))
    assert largest <= 1e-6


def test_iterates_halve_and_restart(task):
    """The comparison above means something only if the runs do more than walk straight on."""
    net, x, y = task.net.double(), task.x[:3].double(), task.y[:3]
    sizes = []
    for row in range(3):
        start = (x[row : row + 1] + 0.05).clamp(0, 1)
        iterates = torch.cat(by_hand(net, x[row : row + 1], int(y[row]), None, start, "linf", "ce"))
        sizes.append(float((iterates[-1] - iterates[-2]).abs().max()))
    assert max(sizes) < 0.01 < EPS["linf"] / 2


def test_checkpoints():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(1) == [1]
    for steps in range(1, 400):
        places = checkpoints(steps)
        gaps = [b - a for a, b in zip([0, *places], places, strict=False)]
        assert gaps[0] == max(1, int(0.22 * steps + 1e-9))
        assert gaps == sorted(gaps, reverse=True)
        assert all(1 <= place <= steps for place in places)
        assert steps - places[-1] < gaps[-1]


# --- losses


def test_dlr_is_scale_free_and_safe():
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, target = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 3, 4, 0, 3])
    for loss, more in ((LOSSES["dlr"], ()), (targeted_dlr, (target,))):
        value = loss(logits, y, *more)
        torch.testing.assert_close(loss(1e4 * logits + 3, y, *more), value)
        expected = [loss_of("dlr" if not more else "t", logits[i : i + 1], int(y[i]), int(target[i])) for i in range(6)]
        torch.testing.assert_close(value, torch.stack(expected))
        leaf = torch.zeros(6, 5, requires_grad=True)
        flat = loss(leaf, y, *more)
        flat.sum().backward()
        assert bool(torch.isfinite(flat).all())
        assert bool(torch.isfinite(leaf.grad).all())
    assert bool(((LOSSES["dlr"](logits, y) > 0) == (logits.argmax(1) != y)).all())


@pytest.mark.parametrize("num_classes", [2, 3, 4, 5])
@pytest.mark.parametrize("attack_loss", ["ce", "dlr", "dlr_targeted"])
def test_any_number_of_classes(num_classes, attack_loss):
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes)).eval()
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(num_classes, 16, generator=generator))
    x = torch.rand(8, 1, 4, 4, generator=generator)
    y = net(x).argmax(1)
    attack = APGD(eps=0.01, steps=5, attack_loss=attack_loss)
    x_adv = attack(net, x, y)  # a small radius: images survive
    assert bool((net(x_adv).argmax(1) == y).any())
    margin = LOSSES["margin"]
    assert bool((margin(net(x_adv), y) > margin(net(x), y)).all())
    assert attack.settings() == APGD(eps=0.01, steps=5, attack_loss=attack_loss).settings()


# --- what the queue may not change


OPTIONS = [
    {"attack_loss": "ce"},
    {"attack_loss": "dlr", "restarts": 3},
    {"attack_loss": "dlr_targeted", "restarts": 2},
    {"attack_loss": "dlr_targeted", "norm": "l2", "eps": 0.85},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dropping_changes_no_verdict(task, options):
    net, x, y = task.net.double(), task.x.double(), task.y
    options = {"eps": 0.08, "steps": 12, **options}

    def verdicts(**more: object) -> list[bool]:
        return (net(APGD(**options, **more)(net, x, y)).argmax(1) == y).tolist()

    whole = verdicts(drop=False)
    assert 0 < sum(whole) < len(whole), "the radius must leave some images and break others"
    assert verdicts() == whole
    for batch_size in (1, 3, 7, 64):
        assert verdicts(batch_size=batch_size) == whole
        assert verdicts(batch_size=batch_size, drop=False) == whole


def test_rows_do_not_depend_on_their_company(task):
    net, x, y = task.net.double(), task.x.double(), task.y
    attack = APGD(eps=0.08, steps=12, attack_loss="dlr_targeted")
    ids = list(range(20, 30))
    together = attack(net, x, y, sample_ids=ids)
    order = [7, 2, 9]
    apart = attack(net, x[order], y[order], sample_ids=[ids[row] for row in order])
    torch.testing.assert_close(apart, together[order], rtol=0, atol=1e-12)
    # without ids a row's draws follow from its place in the batch
    torch.testing.assert_close(attack(net, x[:4], y[:4]), attack(net, x, y)[:4], rtol=0, atol=1e-12)


def test_batches_stay_full_and_never_grow(task):
    net, x, y = task
    sizes: list[int] = []
    watched = Watched(net)
    attack = APGD(eps=0.02, steps=10, attack_loss="dlr_targeted", n_targets=4, batch_size=6)
    x_adv = attack(watched, x, y)
    sizes = [len(batch) for batch in watched.seen[2:]]  # the clean images come in two batches
    standing = int((net(x_adv).argmax(1) == y).sum())
    assert standing >= 5
    assert max(sizes) == 6
    # 10 images, 4 targets, 11 evaluations each: full batches to the last few
    assert sum(size < 5 for size in sizes) <= 2 * 11
    assert sum(sizes) <= 10 * 4 * 11


def test_later_targets_see_survivors_only(task):
    net, x, y = task
    watched = Watched(net)
    APGD(eps=0.3, steps=10, attack_loss="dlr_targeted", n_targets=4)(watched, x, y)
    # everything falls within a few steps of the first target
    assert sum(len(batch) for batch in watched.seen[1:]) <= len(x) * 6


def test_without_drop_the_worst_iterate_comes_back(task):
    net, x, y = task.net.double(), task.x.double(), task.y
    watched = Watched(net)
    x_adv = APGD(eps=0.02, steps=10, drop=False, restarts=2)(watched, x, y)
    with torch.no_grad():
        losses = torch.stack([F.cross_entropy(net(batch), y, reduction="none") for batch in watched.seen[1:]])
        wrong = torch.stack([net(batch).argmax(1) != y for batch in watched.seen[1:]])
        mine = F.cross_entropy(net(x_adv), y, reduction="none")
    among = torch.where(wrong | ~wrong.any(0), losses, -math.inf)
    torch.testing.assert_close(mine, among.amax(0), rtol=0, atol=1e-9)


def test_custom_loss_runs_to_the_end(task):
    net, x, _ = task
    bits = (torch.rand(10, 5, generator=torch.Generator().manual_seed(0)) > 0.5).float()

    def attack_loss(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, target["bits"], reduction="none").sum(1)

    x_adv = APGD(eps=0.05, steps=10, attack_loss=attack_loss)(net, x, {"bits": bits}, rowwise=False)
    with torch.no_grad():
        assert bool((attack_loss(net(x_adv), {"bits": bits}) > attack_loss(net(x), {"bits": bits})).all())


# --- forwards that read the whole batch, random models


class Centred(nn.Module):
    """Subtracts the mean of the batch, which must therefore stay together and in order."""

    def __init__(self, net: nn.Module, num: int) -> None:
        super().__init__()
        self.net, self.num = net, num

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == self.num
        logits = self.net(x)
        return logits - logits.mean(0)


@pytest.mark.parametrize("attack_loss", ["ce", "dlr_targeted"])
def test_a_forward_that_reads_the_batch_gets_all_of_it(task, attack_loss):
    net, x, y = task
    model = Centred(net, len(x)).eval()
    before = LOSSES["margin"](model(x), y).detach()
    x_adv = APGD(eps=0.02, steps=5, attack_loss=attack_loss, batch_size=3)(model, x, y, rowwise=False)
    with torch.no_grad():
        assert float((LOSSES["margin"](model(x_adv), y) - before).mean()) > 0.5


def test_random_models_are_averaged(task):
    net, x, y = task

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = net, 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return self.net(images) + 0.5 * torch.randn(len(images), 5)

    model = Noisy().eval()
    attack = APGD(eps=0.1, steps=5, eot=8, drop=False)
    x_adv = attack(model, x, y)
    assert model.calls == 1 + 6 * 8
    assert float((net(x_adv).argmax(1) == y).float().mean()) <= 0.2


# --- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": 1.0}, "rho=1.0 must be in"),
        ({"eot": 0}, "eot=0 must be a whole number"),
        ({"n_targets": 0}, "n_targets=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"attack_loss": "cw"}, "attack_loss='cw' is unknown"),
        ({"attack_loss": "dlr_targeted", "targeted": True}, "chooses its targets itself"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(UsageError, match=words):
        APGD(**options)


def test_scalar_losses_cannot_be_compared(task):
    net, x, y = task
    attack = APGD(attack_loss=lambda logits, target: F.cross_entropy(logits, target))
    with pytest.raises(UsageError, match="one value per sample"):
        attack(net, x, y)


def test_row_streams_differ():
    assert derive_seed(0, 0, 1) != derive_seed(0, 1, 0)


def test_standing_still_halves_the_step_only_if_it_was_not_halved_before(task):
    net, x, y = task
    attack = APGD(eps=0.1, steps=20)
    problem = attack.problem(net, x[:3], y[:3], Noise(0))
    engine = _APGDEngine(attack, problem, None)
    runs = engine.start(torch.arange(3), 0)
    runs.num_increases = torch.full((3,), 4.0)  # every step raised the loss: no oscillation
    runs.best_loss, runs.checked_loss = torch.tensor([1.0, 1.0, 2.0]), torch.ones(3)
    runs.was_halved = torch.tensor([True, False, False])
    engine._check(runs, torch.full((3,), 4), torch.zeros_like(x[:3]))
    torch.testing.assert_close(runs.step_size, torch.tensor([0.2, 0.1, 0.2]))
    assert runs.was_halved.tolist() == [False, True, False]


@pytest.mark.parametrize("targets", ["tensor", "dict"])
def test_a_loss_of_the_users_goes_with_any_batch_size(targets):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double().eval()
    x, wanted = torch.rand(9, 1, 4, 4).double(), torch.rand(9, 3).double()
    y = wanted if targets == "tensor" else {"wanted": wanted}

    def loss(logits, y):
        return (logits - (y if targets == "tensor" else y["wanted"])).square().sum(1)

    whole, parts = (
        APGD(eps=0.1, steps=8, restarts=2, attack_loss=loss, batch_size=size)(net, x, y, sample_ids=range(9))
        for size in (None, 4)
    )
    assert torch.allclose(whole, parts, atol=1e-12, rtol=0)
    assert bool((loss(net(whole), y) > loss(net(x), y)).all())
