"""The shortest step onto a hyperplane in a box, against bisection and against every other step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from robustdist.attacks.hyperplane import dual_norm, shortest_step

ORDER = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}


def cases() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(40, 1, 3, 4, generator=generator, dtype=torch.float64)
    x = x.masked_fill(x < 0.2, 0.0).masked_fill(x > 0.8, 1.0)
    w = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    w = w.masked_fill(torch.rand(x.shape, generator=generator) < 0.1, 0.0)
    gap = torch.randn(40, generator=generator, dtype=torch.float64)
    return x, w, gap


def by_bisection(x: Tensor, w: Tensor, gap: Tensor, norm: str) -> Tensor:
    """The common factor of all entries found by halving; for l1 the entries filled one after another."""
    flat, slope = x.flatten(1), w.flatten(1) * gap.sign()[:, None]
    room = torch.where(slope > 0, 1 - flat, flat).masked_fill(slope == 0, 0)
    steps = []
    for row in range(len(flat)):
        a, r, want = slope[row].abs(), room[row], float(gap[row].abs())
        if norm == "l1":
            step, left = torch.zeros_like(a), want
            for entry in a.argsort(descending=True).tolist():
                if left <= 0 or a[entry] == 0:
                    break
                step[entry] = min(float(r[entry]), left / float(a[entry]))
                left -= float(step[entry] * a[entry])
        else:
            profile = a if norm == "l2" else torch.ones_like(a)
            low, high = 0.0, 1e4
            for _ in range(200):
                middle = (low + high) / 2
                worth = float((a * torch.minimum(middle * profile, r)).sum())
                low, high = (middle, high) if worth < want else (low, middle)
            step = torch.minimum(high * profile, r)
        steps.append(step * slope[row].sign())
    return torch.stack(steps).view_as(x)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_equals_bisection(norm):
    x, w, gap = cases()
    step = shortest_step(x, w, gap, norm, (0.0, 1.0))
    torch.testing.assert_close(step, by_bisection(x, w, gap, norm), rtol=0, atol=1e-9)
    assert float((x + step).min()) >= -1e-12
    assert float((x + step).max()) <= 1 + 1e-12
    reachable = torch.where(w * gap.view(-1, 1, 1, 1) > 0, 1 - x, x)
    possible = (w.abs() * reachable).flatten(1).sum(1) >= gap.abs()
    reached = (w * step).flatten(1).sum(1)
    assert int(possible.sum()) > 20
    torch.testing.assert_close(reached[possible], gap[possible], rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_without_a_box_the_length_is_the_gap_over_the_dual_norm(norm):
    x, w, gap = cases()
    step = shortest_step(x, w, gap, norm, None)
    torch.testing.assert_close((w * step).flatten(1).sum(1), gap)
    lengths = torch.linalg.vector_norm(step.flatten(1), ord=ORDER[norm], dim=1)
    torch.testing.assert_close(lengths, gap.abs() / dual_norm(w, norm))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_no_direction_no_step(norm):
    x, w, gap = cases()
    step = shortest_step(x, torch.zeros_like(w), gap, norm, (0.0, 1.0))
    assert torch.equal(step, torch.zeros_like(x))
    assert torch.equal(shortest_step(x, w, torch.zeros_like(gap), norm, (0.0, 1.0)).abs(), torch.zeros_like(x))
