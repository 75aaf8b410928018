"""FreeLB against K separate passes written here."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD, TokenPGD
from robustdist.core.rng import Noise
from robustdist.errors import UsageError
from robustdist.objectives import FreeAT, FreeLB, GradAlign

EPS, ALPHA = 0.4, 0.3


def sentences() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    return net, torch.randn(6, 4, 5), torch.randint(0, 3, (6,))


def by_hand(net: nn.Module, x: Tensor, y: Tensor, start: Tensor, steps: int) -> list[Tensor]:
    """K passes with K backward passes, the parameter gradients added up; one token after the other."""
    total = [torch.zeros_like(parameter) for parameter in net.parameters()]
    point = start
    for _ in range(steps):
        leaf = point.clone().requires_grad_()
        net.zero_grad()
        F.cross_entropy(net(leaf), y).backward()
        for sum_, parameter in zip(total, net.parameters(), strict=True):
            sum_ += parameter.grad / steps
        point = point.clone()
        for row in range(x.shape[0]):
            for token in range(x.shape[1]):
                clean, grad = x[row, token], leaf.grad[row, token]
                unit = math.sqrt(float(clean.square().sum()))
                delta = point[row, token] + ALPHA * unit * grad / grad.square().sum().sqrt() - clean
                point[row, token] = clean + delta * min(1.0, EPS * unit / math.sqrt(float(delta.square().sum())))
    net.zero_grad()
    return total


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_gradient_is_the_mean_over_the_points_of_the_ascent(steps):
    net, x, y = sentences()
    attack = TokenPGD(eps=EPS, step_size=ALPHA)
    start = attack.problem(net, x, y, Noise(0, 2, 5)).start(0)
    expected = by_hand(copy.deepcopy(net), x, y, start, steps)
    loss = FreeLB(steps)(net, x, y, attack=attack, rank=2, step=5)
    loss.backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_the_steps_are_its_own_and_the_last_loss_is_larger():
    net, x, y = sentences()
    few, many = TokenPGD(eps=EPS, step_size=ALPHA, steps=1), TokenPGD(eps=EPS, step_size=ALPHA, steps=9)
    losses = [FreeLB(3)(net, x, y, attack=attack) for attack in (few, many)]
    assert torch.equal(*losses)
    mean_of_more = FreeLB(6)(net, x, y, attack=few)
    assert float(mean_of_more.detach()) > float(losses[0].detach())


def test_dropout_has_one_mask_along_the_ascent():
    net, x, y = sentences()
    net.insert(2, nn.Dropout(0.5))
    attack = TokenPGD(eps=EPS, step_size=0)
    logs: list[dict[str, Tensor]] = []

    class Watched(FreeLB):
        def compute(self, context):
            loss = super().compute(context)
            logs.append(context.logs)
            return loss

    torch.manual_seed(5)
    FreeLB(1)(net, x, y, attack=attack)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    Watched(3)(net, x, y, attack=attack)
    # without a step the points are the same, and so are the losses, bit for bit
    assert torch.equal(logs[0]["first_loss"], logs[0]["last_loss"])
    assert torch.equal(torch.get_rng_state(), state)  # the next draw is that after one pass
    assert not torch.equal(FreeLB(1)(net, x, y, attack=attack), FreeLB(1)(net, x, y, attack=attack))


def test_pixels_keep_their_box():
    """In pixel space the points are those of PGD in its box."""
    torch.manual_seed(0)
    seen: list[Tensor] = []
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    x, y = torch.rand(5, 1, 2, 2), torch.randint(0, 3, (5,))
    FreeLB(3)(net, x, y, attack=PGD(eps=0.3, step_size=0.2))
    assert len(seen) == 3
    for point in seen:
        assert float((point - x).abs().max()) <= 0.3 + 1e-6
        assert 0 <= float(point.min()) <= float(point.max()) <= 1
    assert float((seen[2] - seen[1]).abs().max()) > 0.1


def test_a_perturbation_is_not_carried_on_to_other_tokens():
    with pytest.raises(UsageError, match=r"FreeAT carries its perturbation on .* use FreeLB"):
        FreeAT().adapt(TokenPGD())


def test_grad_align_compares_with_a_point_of_the_balls_of_tokens():
    net, x, y = sentences()
    attack = TokenPGD(eps=EPS, step_size=ALPHA)
    seen: list[Tensor] = []
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    GradAlign()(net, x, y, attack=attack, rank=2, step=5)
    noisy = GradAlign().adapt(attack).problem(net, x, y, Noise(0, 2, 5)).start("align")
    assert any(torch.equal(point, noisy) for point in seen)
    assert float(((noisy - x).norm(dim=2) / x.norm(dim=2)).max()) > 0.8 * EPS
