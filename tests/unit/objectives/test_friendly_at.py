"""FriendlyAT: where the attack stops as training goes on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from robustdist.attacks import APGD, PGD, FriendlyPGD, TokenPGD
from robustdist.core.testing import TinyNet, toy_images
from robustdist.errors import UsageError
from robustdist.objectives import AWP, FriendlyAT

ATTACK = PGD(eps=0.2, steps=5, step_size=0.06, start_std=0.001, restarts=3)


def gradients(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()))


@pytest.mark.parametrize("tau", [0, 2])
def test_loss_and_gradient_are_those_at_the_stopped_points(tau):
    net = TinyNet().double()
    x, y = toy_images(12)
    x = x.double()
    loss = FriendlyAT(tau)(net, x, y, attack=ATTACK, step=3)
    inner = FriendlyPGD(tau=tau, eps=0.2, steps=5, step_size=0.06)
    expected = F.cross_entropy(net(inner(net, x, y, step=3)), y)
    assert torch.equal(loss, expected)
    for ours, theirs in zip(gradients(net, loss), gradients(net, expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("progress", "tau"), [(0.01, 0), (0.41, 0), (0.42, 1), (0.74, 1), (0.75, 2), (1.0, 2)])
def test_patience_follows_progress(progress, tau):
    objective = FriendlyAT([(0.0, 0), (0.42, 1), (0.75, 2)])
    assert objective.follows_progress
    assert AWP(objective).follows_progress
    inner = objective.adapt(ATTACK)
    seen = []

    class Context:
        x = y = None

        def __init__(self, progress):
            self.progress, self.logs = progress, {}

        def attack(self, x, y):
            seen.append(inner.tau)
            inner.mean_steps = torch.tensor(2.5)

        def loss(self, x):
            return torch.tensor(1.0)

    context = Context(progress)
    objective.compute(context)
    assert seen == [tau]
    assert context.logs == {"mean_steps": torch.tensor(2.5)}


@pytest.mark.parametrize(
    "tau",
    [[], [(0.1, 1)], [(0.0, 0), (0.5, 1), (0.5, 2)], [(0.0, 0), (1.5, 1)], [(0.0, -1)], -1],
)
def test_impossible_patience_is_named(tau):
    with pytest.raises(UsageError, match=r"^tau="):
        FriendlyAT(tau)


@pytest.mark.parametrize("attack", [APGD(eps=0.1), TokenPGD(eps=0.1)], ids=repr)
def test_other_attacks_are_refused(attack):
    with pytest.raises(UsageError, match=rf"{type(attack).__name__} it cannot: use attack=PGD"):
        FriendlyAT().adapt(attack)
