"""Losses and gradients of objectives against the formulas of their papers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.objectives import FGSMRS, MART, NFGSM, TRADES, FastBAT, GradAlign, Objective
from robustdist.objectives.losses import kl_divergence, mart_loss
from tests.unit.objectives.papers_support import (
    EPS,
    Loss,
    assert_close,
    computed,
    fgsm_rs,
    in_ball,
    kl,
    network,
    noise,
    sign_steps,
    slope,
    summed_ce,
    trades,
    uniform_start,
)


def mart(x: Tensor, y: Tensor, beta: float) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        x_adv = sign_steps(summed_ce(net, y), x)
        total = x.new_zeros(())
        for p, q, label in zip(net(x).softmax(1), net(x_adv).softmax(1), y.tolist(), strict=True):
            others = torch.cat([q[:label], q[label + 1 :]])
            boosted = -q[label].log() - (1.0001 - others.max() + 1e-12).log()
            total = total + boosted + beta * (p * (p / q).log()).sum() * (1.0000001 - p[label])
        return total / len(y)

    return loss


def n_fgsm(x: Tensor, y: Tensor, size: float, clip: bool = True) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        start = uniform_start(x, size * EPS)
        if clip:
            start = start.clamp(0, 1)
        return F.cross_entropy(net((start + EPS * slope(summed_ce(net, y), start).sign()).clamp(0, 1)), y)

    return loss


def grad_align(x: Tensor, y: Tensor, weight: float) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        fixed = slope(summed_ce(net, y), x)
        noisy = in_ball(uniform_start(x, EPS, "align"), x).requires_grad_()
        moving = torch.autograd.grad(summed_ce(net, y)(noisy), noisy, create_graph=True)[0]
        cosines = [
            (a * b).sum() / (a * a).sum().sqrt() / (b * b).sum().sqrt() for a, b in zip(fixed, moving, strict=True)
        ]
        return fgsm_rs(x, y, 1.25)(net) + weight * (1 - torch.stack(cosines).mean())

    return loss


FORMULAS: list[tuple[Objective, Callable[[Tensor, Tensor], Loss]]] = [
    (TRADES(), lambda x, y: trades(x, y, 6.0)),
    (TRADES(beta=1.5), lambda x, y: trades(x, y, 1.5)),
    (MART(), lambda x, y: mart(x, y, 5.0)),
    (MART(beta=0.0), lambda x, y: mart(x, y, 0.0)),
    (FGSMRS(), lambda x, y: fgsm_rs(x, y, 1.25)),
    (FGSMRS(step_factor=0.6), lambda x, y: fgsm_rs(x, y, 0.6)),
    (NFGSM(), lambda x, y: n_fgsm(x, y, 2.0)),
    (NFGSM(noise=1.0), lambda x, y: n_fgsm(x, y, 1.0)),
    (NFGSM(clip_noise=False), lambda x, y: n_fgsm(x, y, 2.0, clip=False)),
    (GradAlign(), lambda x, y: grad_align(x, y, 0.2)),
    (GradAlign(weight=2.0), lambda x, y: grad_align(x, y, 2.0)),
]


@pytest.mark.parametrize(("objective", "formula"), FORMULAS, ids=[repr(objective) for objective, _ in FORMULAS])
def test_loss_and_gradient_equal_the_formula(objective, formula, net, batch):
    loss, gradient = computed(objective, net, batch)
    expected = formula(*batch)(net)
    assert_close([loss], [expected.detach()])
    assert_close(gradient, list(torch.autograd.grad(expected, list(net.parameters()))))
    assert float(gradient[0].abs().max()) > 1e-3


@pytest.mark.parametrize("term", ["kl", "mart"])
def test_more_classes_do_not_weaken_the_term(term):
    torch.manual_seed(0)
    clean, robust, y = torch.randn(4, 10).double(), torch.randn(4, 10).double(), torch.tensor([1, 0, 9, 3])

    def value(classes: int) -> Tensor:
        # classes that nobody expects, for both
        one, other = (F.pad(logits, (0, classes - 10), value=-60.0) for logits in (clean, robust))
        return kl_divergence(other, one) if term == "kl" else mart_loss(one, other, y, 5.0)

    assert float(value(10).min()) > 0.05
    for classes in (100, 1000):
        torch.testing.assert_close(value(classes), value(10), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("term", ["kl", "mart"])
def test_huge_logits_give_finite_values_and_gradients(term, dtype):
    clean = torch.tensor([[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0], [200.0, -200.0, -200.0]], dtype=dtype)
    robust, y = clean.flip(1).clone(), torch.tensor([0, 0, 1])
    clean.requires_grad_()
    robust.requires_grad_()
    value = kl_divergence(robust, clean) if term == "kl" else mart_loss(clean, robust, y, 5.0)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(torch.isfinite(value).all())
    value.sum().backward()
    for logits in (clean, robust):
        assert bool(torch.isfinite(logits.grad).all())
    assert float(robust.grad.abs().max()) > 0.1


def test_the_divergence_is_that_from_the_target():
    target, logits = torch.tensor([[0.0, 1.0, 3.0]]).double(), torch.tensor([[2.0, 0.0, 0.5]]).double()
    expected = kl(target.softmax(1), logits.softmax(1))
    torch.testing.assert_close(kl_divergence(logits, target), expected)
    assert abs(float(expected - kl(logits.softmax(1), target.softmax(1)))) > 0.05


def step_length(grad: Tensor, step: float | str, factor: float) -> Tensor | float:
    if step == "paper":
        return 2000 / 255  # the radius here is above 8/255
    if step == "relative":
        return torch.stack([factor * EPS / row.abs().mean() for row in grad]).view(-1, 1, 1, 1)
    return float(step)


def linearisation_point(net: nn.Module, x: Tensor, y: Tensor, step: float | str, factor: float) -> Tensor:
    """Steps 1 and 2 of the released algorithm."""
    p, q = torch.clamp(-x, min=-EPS), torch.clamp(1 - x, max=EPS)
    z = torch.max(torch.min(EPS * (2 * noise().uniform(x, "start") - 1), q), p)
    grad = -slope(summed_ce(net, y), x + z)  # of the attack loss
    return torch.max(torch.min(z - step_length(grad, step, factor) * grad, q), p)


def released_sequence(
    net: nn.Module, x: Tensor, y: Tensor, step: float | str = "paper", factor: float = 2.0, lmbda: float = 10.0
) -> tuple[Tensor, list[Tensor], float]:
    """Steps 1 to 7 with two backward passes; also the share of coordinates inside the box."""
    parameters = list(net.parameters())
    p, q = torch.clamp(-x, min=-EPS), torch.clamp(1 - x, max=EPS)
    delta = linearisation_point(net, x, y, step, factor).requires_grad_()
    g2 = torch.autograd.grad(-F.cross_entropy(net(x + delta), y, reduction="sum"), delta, create_graph=True)[0]
    star = torch.max(torch.min(delta - step_length(g2, step, factor) * g2, q), p).detach()
    inside = (star > p + 1e-7) & (star < q - 1e-7)
    w = inside * slope(summed_ce(net, y), x + star) / lmbda
    cross = torch.autograd.grad(-(g2 * w).sum() / len(y), parameters, allow_unused=True, retain_graph=True)
    loss = F.cross_entropy(net(x + star), y, reduction="sum") / len(y)
    direct = torch.autograd.grad(loss, parameters)
    total = [d if c is None else d + c for d, c in zip(direct, cross, strict=True)]
    return loss.detach(), total, float(inside.double().mean())


@pytest.mark.parametrize("step", ["paper", "relative", 0.05, 0.5])
@pytest.mark.parametrize("weight", [0.1, 1.0, 0.0])
def test_fast_bat_has_the_gradient_of_the_released_sequence(net, batch, step, weight):
    _, gradient = computed(FastBAT(step, implicit_weight=weight), net, batch)
    lmbda = 1 / weight if weight else float("inf")
    _, expected, _ = released_sequence(net, *batch, step=step, lmbda=lmbda)
    assert_close(gradient, expected)


def test_the_released_sequence_has_both_parts(batch):
    net = network(6, 9, 4)
    _, both, inside = released_sequence(net, *batch, step=0.05)
    _, direct, _ = released_sequence(net, *batch, step=0.05, lmbda=float("inf"))
    assert 0.3 < inside < 1
    assert max(float((a - b).abs().max()) for a, b in zip(both, direct, strict=True)) > 1e-4


def test_the_constant_of_the_paper_depends_on_the_radius():
    steps = {eps: FastBAT("paper")._step(torch.ones(1), eps) for eps in (4 / 255, 8 / 255, 9 / 255, 16 / 255)}
    assert steps == {4 / 255: 5000 / 255, 8 / 255: 5000 / 255, 9 / 255: 2000 / 255, 16 / 255: 2000 / 255}


@pytest.mark.parametrize("sizes", [(6, 4), (6, 9, 4)], ids=["linear", "relu"])
@pytest.mark.parametrize("step", [0.01, 0.3], ids=["most inside", "some outside"])
def test_fast_bat_is_the_derivative_of_the_bilevel_loss(sizes, step, batch):
    # the weight of the implicit part is the step: then the loss is that of delta*(theta), from a fixed z
    net = network(*sizes)
    x, y = batch
    p, q = torch.clamp(-x, min=-EPS), torch.clamp(1 - x, max=EPS)
    z = linearisation_point(net, x, y, step, 2.0)
    _, gradient = computed(FastBAT(step, implicit_weight=step), net, batch)

    def bilevel() -> float:
        star = torch.max(torch.min(z + step * slope(summed_ce(net, y), x + z), q), p)
        with torch.no_grad():
            return float(F.cross_entropy(net(x + star), y))

    numeric = []
    for parameter in net.parameters():
        column = torch.zeros_like(parameter).flatten()
        for place in range(parameter.numel()):
            values = []
            for shift in (1e-6, -1e-6):
                parameter.data.view(-1)[place] += shift
                values.append(bilevel())
                parameter.data.view(-1)[place] -= shift
            column[place] = (values[0] - values[1]) / 2e-6
        numeric.append(column.view_as(parameter))
    assert_close(gradient, numeric, tolerance=1e-7)
    _, direct = computed(FastBAT(step, implicit_weight=0.0), net, batch)
    assert max(float((a - b).abs().max()) for a, b in zip(gradient, direct, strict=True)) > 1e-5
