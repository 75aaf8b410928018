"""Balls, projections, starts and steps against slow derivations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robustdist.attacks.functional import ascent_step, distance, project, project_l1_ball, random_start
from robustdist.core.rng import Noise

ORDERS = {"linf": math.inf, "l2": 2, "l1": 1}


def naive_l1_projection(delta: Tensor, eps: float) -> Tensor:
    """Shrink towards zero by a threshold found through bisection, one row at a time, in double precision."""
    rows = []
    for row in delta.double().flatten(1):
        if float(row.abs().sum()) <= eps:
            rows.append(row)
            continue
        low, high = 0.0, float(row.abs().max())
        for _ in range(200):
            middle = (low + high) / 2
            if float((row.abs() - middle).clamp(min=0).sum()) > eps:
                low = middle
            else:
                high = middle
        rows.append(row.sign() * (row.abs() - high).clamp(min=0))
    return torch.stack(rows).view(delta.shape)


@pytest.mark.parametrize("eps", [0.5, 3.0, 40.0])
def test_l1_projection_is_the_euclidean_one(eps):
    delta = torch.randn(20, 3, 5, 5) * torch.logspace(-3, 1, 20).view(-1, 1, 1, 1)
    delta[3] = 0.0
    delta[4] = 0.0
    delta[4, 0, 0, 0] = -100.0  # one coordinate takes the whole radius
    delta[5] = 2.0  # ties
    projected = project_l1_ball(delta, eps)
    torch.testing.assert_close(projected.double(), naive_l1_projection(delta, eps), rtol=0, atol=2e-6)
    outside = delta.abs().sum((1, 2, 3)) > eps
    assert bool(outside.any())
    assert bool((~outside).any())
    assert torch.equal(projected[~outside], delta[~outside])


def test_l1_projection_keeps_its_radius_in_large_images():
    delta = torch.randn(2, 3, 224, 224)
    projected = project_l1_ball(delta, 12.0)
    torch.testing.assert_close(
        projected.double().abs().sum((1, 2, 3)), torch.full((2,), 12.0).double(), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), None], ids=["box", "no-box"])
def test_projection_holds_both_constraints_and_moves_nothing_inside(norm, bounds):
    eps = {"linf": 0.1, "l2": 0.7, "l1": 4.0}[norm]
    x = torch.rand(8, 3, 4, 4)
    far = x + torch.randn(x.shape)
    kept = x.clone(), far.clone()
    projected = project(far, x, eps, norm, bounds)
    assert torch.equal(x, kept[0])
    assert torch.equal(far, kept[1])
    lengths = torch.linalg.vector_norm((projected.double() - x.double()).flatten(1), ord=ORDERS[norm], dim=1)
    assert float(lengths.max()) <= eps + 1e-6
    torch.testing.assert_close(lengths.float(), distance(projected, x, norm))
    if bounds is None:
        # without a box the projection ends on the sphere
        torch.testing.assert_close(lengths, torch.full_like(lengths, eps), rtol=1e-5, atol=0)
    else:
        assert 0.0 <= float(projected.min()) <= float(projected.max()) <= 1.0
    near = 0.5 + torch.full_like(x, 0.5 * eps / {"linf": 1, "l2": math.sqrt(48), "l1": 48}[norm])
    torch.testing.assert_close(project(near, torch.full_like(x, 0.5), eps, norm, bounds), near, rtol=0, atol=1e-7)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_start_is_uniform_in_the_ball(norm):
    eps, size = 0.5, 4
    x = torch.full((20000, size), 10.0)
    delta = (random_start(x, eps, norm, None, Noise(0)) - x).double()
    if norm == "linf":
        # each coordinate has mean 0 and variance eps^2 / 3
        assert float(delta.mean(0).abs().max()) < 5 * eps / math.sqrt(3 * len(x))
        torch.testing.assert_close(delta.var(0), torch.full((size,), eps**2 / 3).double(), rtol=0.05, atol=0)
    else:
        # the share of points within r is (r / eps)^size
        lengths = delta.norm(dim=1)
        for share in (0.1, 0.5, 0.9):
            inside = float((lengths < eps * share ** (1 / size)).double().mean())
            assert abs(inside - share) < 5 * math.sqrt(share * (1 - share) / len(x))
        assert float(delta.mean(0).abs().max()) < 5 * eps / math.sqrt(len(x))
    assert float(torch.linalg.vector_norm(delta, ord=ORDERS[norm], dim=1).max()) <= eps + 1e-5


def test_l1_start_lies_in_the_ball_and_differs_per_sample():
    x = torch.full((500, 3, 4, 4), 10.0)
    delta = random_start(x, 6.0, "l1", None, Noise(0)) - x
    lengths = delta.double().abs().sum((1, 2, 3))
    assert float(lengths.max()) <= 6.0 + 1e-4
    assert float(lengths.min()) < 1.0
    assert float(lengths.max()) > 5.0
    assert float((delta[0] - delta[1]).abs().max()) > 0.01


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-23, 1e-30, 1e25])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_step_has_unit_length_whatever_the_size_of_the_gradient(norm, scale):
    grad = torch.randn(4, 3, 8, 8) * scale
    step = ascent_step(grad, torch.full_like(grad, 0.5), norm, (0.0, 1.0))
    lengths = torch.linalg.vector_norm(step.double().flatten(1), ord=ORDERS[norm], dim=1)
    torch.testing.assert_close(lengths, torch.ones(4).double(), rtol=1e-5, atol=0)
    assert bool((step * grad.sign() >= 0).all())
    if norm == "l2":
        torch.testing.assert_close(
            step.double(), grad.double() / grad.double().flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        )


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_step_of_a_zero_gradient_is_zero(norm):
    grad = torch.zeros(2, 3, 4, 4)
    grad[1] = 1.0
    step = ascent_step(grad, torch.full_like(grad, 0.5), norm, (0.0, 1.0))
    assert bool((step[0] == 0).all())
    assert float(step[1].abs().sum()) > 0.9


def test_l1_step_moves_the_largest_free_coordinates_equally():
    grad = torch.arange(1.0, 101.0).view(1, 100)
    x = torch.full((1, 100), 0.5)
    x[0, 99] = 1.0  # the largest gradient pushes against the box
    grad[0, 98] = -99.0
    step = ascent_step(grad, x, "l1", (0.0, 1.0))
    expected = torch.zeros(1, 100)
    expected[0, 94:98] = 0.2
    expected[0, 98] = -0.2
    torch.testing.assert_close(step, expected)
    unbounded = ascent_step(grad, x, "l1", None)
    assert unbounded[0].nonzero().flatten().tolist() == [95, 96, 97, 98, 99]
