"""FAB against a plain re-derivation for one image, and its class-wise form against the two-class one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import FAB
from robustdist.attacks.hyperplane import shortest_step
from robustdist.errors import UsageError

BOX = (0.0, 1.0)


def length(delta: Tensor, norm: str) -> float:
    return float(torch.linalg.vector_norm(delta.flatten(), ord={"linf": float("inf"), "l2": 2.0, "l1": 1.0}[norm]))


def by_hand(net: nn.Module, x: Tensor, y: int, target: int, norm: str, eps: float, steps: int) -> Tensor | None:
    """The point within ``eps`` that the walk to one target finds first, or at its end; None if it finds none."""
    at, nearest = x, None
    for step in range(steps + 1):
        wrong = int(net(at).argmax()) != y
        if wrong:
            if length(at - x, norm) <= eps:
                return at
            if nearest is None or length(at - x, norm) < length(nearest - x, norm):
                nearest = at
            at = x + 0.9 * (at - x)
        if step == steps:
            break
        leaf = at.clone().requires_grad_()
        logits = net(leaf)[0]
        f = logits[target] - logits[y]
        (w,) = torch.autograd.grad(f, leaf)
        f = f.detach()[None]
        first = shortest_step(at, w, -f, norm, BOX)
        second = shortest_step(x, w, -f + (w * (at - x)).sum()[None], norm, BOX)
        alpha = min(0.1, length(first, norm) / (length(first, norm) + length(second, norm)))
        at = ((1 - alpha) * (at + 1.05 * first) + alpha * (x + 1.05 * second)).clamp(*BOX)
    if nearest is None:
        return None
    asked = x + min(1.0, eps / length(nearest - x, norm)) * (nearest - x)
    return asked if int(net(asked).argmax()) != y else None


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.09), ("l2", 0.95), ("l1", 6.0)])
def test_walks_are_those_of_the_paper(task, norm, eps):
    net, x, y = task.net.double(), task.x.double(), task.y
    attack = FAB(norm=norm, eps=eps, steps=15, n_targets=2)
    found = attack(net, x, y)
    broken = []
    for row in range(len(x)):
        order = net(x[row : row + 1])[0].argsort(descending=True).tolist()
        order.remove(int(y[row]))
        walks = [by_hand(net, x[row : row + 1], int(y[row]), target, norm, eps, 15) for target in order[:2]]
        walks = [walk for walk in walks if walk is not None]
        broken.append(bool(walks))
        if walks:
            assert min(float((walk - found[row]).abs().max()) for walk in walks) < 1e-8
    assert 0 < sum(broken) < len(broken), "the radius must leave some images and break others"
    assert (net(found).argmax(1) != y).tolist() == broken


@pytest.mark.parametrize("options", [{}, {"n_targets": None}, {"restarts": 2}], ids=str)
def test_neither_dropping_nor_company_changes_a_verdict(task, options):
    net, x, y = task.net.double(), task.x.double(), task.y

    def verdicts(**more: object) -> list[bool]:
        return (net(FAB(eps=0.085, steps=12, **options, **more)(net, x, y)).argmax(1) == y).tolist()

    whole = verdicts(drop=False)
    assert 0 < sum(whole) < len(whole)
    assert verdicts() == whole
    assert verdicts(batch_size=3) == whole


def test_the_nearest_hyperplane_is_the_only_one_with_two_classes():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    x = torch.rand(12, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = net(x).argmax(1)
    targeted, nearest = (FAB(eps=0.5, steps=10, n_targets=n)(net, x, y) for n in (9, None))
    torch.testing.assert_close(targeted, nearest, rtol=0, atol=1e-12)


def test_restarts_begin_at_half_the_radius(task):
    net, x, y = task
    seen: list[Tensor] = []

    def forward(images: Tensor) -> Tensor:
        seen.append(images.detach())
        return net(images)

    FAB(eps=0.01, steps=1, restarts=2, n_targets=1)(net, x, y, forward=forward)
    distances = [float((batch - x).abs().max()) for batch in seen if len(batch) == len(x)]
    assert distances[:2] == [0.0, 0.0]  # clean logits and the first run's start
    assert any(distance == pytest.approx(0.005, abs=1e-6) for distance in distances[2:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eta": 0.9}, "eta=0.9 must be at least 1"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"alpha_max": 2.0}, "alpha_max=2.0"),
        ({"n_targets": 0}, "n_targets=0"),
        ({"attack_loss": "ce"}, "differences of logits"),
        ({"targeted": True}, "no targeted mode"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(UsageError, match=words):
        FAB(**options)
