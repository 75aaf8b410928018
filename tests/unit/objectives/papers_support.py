"""Small networks and naive forms of attacks and losses, to judge objectives by."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD
from robustdist.core.rng import Noise
from robustdist.objectives import Objective

EPS, STEP_SIZE, STEPS = 0.1, 0.03, 3


SEED, RANK, STEP = 3, 1, 7


TOLERANCE = 1e-10


Loss = Callable[[nn.Module], Tensor]


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for num_in, num_out in itertools.pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


class ConvNet(nn.Module):
    """A convolution, a layer norm (weight of one dimension), a table (two dimensions, another name), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.norm = nn.LayerNorm(6)
        self.table = nn.Parameter(torch.eye(6) + 0.1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x).flatten(1)) @ self.table))


def noise() -> Noise:
    return Noise(SEED, RANK, STEP)


def in_ball(candidate: Tensor, x: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(candidate, x + EPS), x - EPS).clamp(0, 1)


def slope(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a scalar function, without a graph."""
    at = at.detach().clone().requires_grad_()
    return torch.autograd.grad(value(at), at)[0].detach()


def summed_ce(net: nn.Module, y: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: -net(x).softmax(1).log()[range(len(y)), y].sum()


def sign_steps(value: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the end of PGD with the start of TRADES and MART."""
    x_adv = in_ball(x + 0.001 * noise().normal(x, "start", 0), x)
    for _ in range(STEPS):
        x_adv = in_ball(x_adv + STEP_SIZE * slope(value, x_adv).sign(), x)
    return x_adv


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1)


def trades(x: Tensor, y: Tensor, beta: float) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        clean = net(x).softmax(1).detach()
        x_adv = sign_steps(lambda x_adv: kl(clean, net(x_adv).softmax(1)).sum(), x)
        p = net(x).softmax(1)
        return -p[range(len(y)), y].log().mean() + beta * kl(p, net(x_adv).softmax(1)).mean()

    return loss


def uniform_start(x: Tensor, radius: float, *tag: int | str) -> Tensor:
    return x + radius * (2 * noise().uniform(x, "start", *tag) - 1)


def one_step(net: nn.Module, x: Tensor, y: Tensor, factor: float) -> Tensor:
    start = in_ball(uniform_start(x, EPS, 0), x)
    return in_ball(start + factor * EPS * slope(summed_ce(net, y), start).sign(), x)


def fgsm_rs(x: Tensor, y: Tensor, factor: float) -> Loss:
    return lambda net: F.cross_entropy(net(one_step(net, x, y, factor)), y)


def attack() -> PGD:
    # start and number of steps are for the objective to say, where its paper does
    return PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, seed=SEED)


def computed(objective: Objective, net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
    net.zero_grad()
    loss = objective(net, *batch, attack=attack(), rank=RANK, step=STEP)
    loss.backward()
    objective.after_backward()
    return loss.detach(), [parameter.grad.clone() for parameter in net.parameters()]


def assert_close(one: list[Tensor], other: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert bool(torch.isfinite(a).all())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
