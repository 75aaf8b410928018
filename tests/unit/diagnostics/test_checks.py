"""From verdicts to checks, against the numbers that a fair coin allows."""

from __future__ import annotations

import itertools

import pytest
import torch

from robustdist.diagnostics import checks


def verdicts(*runs: tuple[int, bool]) -> torch.Tensor:
    """Verdicts written as runs: (3, True), (2, False) is right three times, then wrong twice."""
    return torch.tensor([value for count, value in runs for _ in range(count)])


def right(count: int, total: int = 200, start: int = 0) -> torch.Tensor:
    found = torch.zeros(total, dtype=torch.bool)
    found[start : start + count] = True
    return found


def test_the_sign_test_is_that_of_counting_all_throws():
    for total in range(9):
        throws = list(itertools.product([0, 1], repeat=total))
        for wins in range(total + 1):
            share = sum(sum(throw) >= wins for throw in throws) / len(throws)
            assert checks.better_than_chance(wins, total - wins) == (share <= 0.05)
    assert not checks.better_than_chance(0, 0)
    assert checks.better_than_chance(5000, 4000)


@pytest.mark.parametrize(
    ("margin", "ce", "passed", "word"),
    [
        (0, 0, True, ""),
        (1, 0, False, "rounding"),
        (0, 1, True, ""),
        (0, 2, False, "blind"),
        (100, 100, False, "rounding"),
    ],
)
def test_gradient(margin, ce, passed, word):
    check = checks.gradient(100, margin, ce)
    assert check.passed is passed
    assert word in check.detail


def test_gradient_without_images():
    assert checks.gradient(0, 0, 0).passed


@pytest.mark.parametrize(
    ("single", "many", "passed", "word"),
    [
        (right(100), right(90), True, ""),
        (right(100), right(104), True, ""),  # four images are chance
        (right(100), right(105), False, "masked"),
        (right(0), right(5, start=100), False, "masked"),
        (right(160), right(4), False, "catastrophic"),
        (right(159), right(4), True, ""),
        (right(160), right(5), True, ""),
    ],
)
def test_one_step(single, many, passed, word):
    check = checks.one_step(right(200), single, many, 50)
    assert check.passed is passed
    assert word in check.detail


def test_nothing_right_is_no_catastrophic_overfitting():
    assert checks.one_step(right(0), right(0), right(0), 50).passed


@pytest.mark.parametrize(
    ("counts", "passed", "word"),
    [
        ([200, 150, 100, 0], True, "0.0 % stay right at radius 3"),
        ([200, 150, 100, 10], True, "5.0 %"),
        ([200, 150, 100, 11], False, "does not work"),
        ([200, 100, 105, 0], False, "rises from 50.0 % at radius 1 to 52.5 % at 2"),
        ([200, 100, 104, 0], True, ""),
        ([200, 200, 200, 200], False, "does not work"),
    ],
)
def test_larger_radius(counts, passed, word):
    check = checks.larger_radius([(float(radius), right(count)) for radius, count in enumerate(counts)])
    assert check.passed is passed
    assert word in check.detail


@pytest.mark.parametrize(
    ("counts", "held", "strongest", "passed", "word"),
    [
        ([150, 100, 90], 90, 85, True, "leaves 45.0 % right, more steps and restarts 42.5 %"),
        ([150, 100, 90], 90, 80, True, ""),  # five points
        ([150, 100, 90], 90, 79, False, "more of them"),
        ([150, 100, 105], 90, 90, False, "rises from 50.0 % with 1 steps to 52.5 % with 2"),
    ],
)
def test_more_steps(counts, held, strongest, passed, word):
    curve = [(steps, right(count)) for steps, count in enumerate(counts)]
    check = checks.more_steps(curve, right(held), right(strongest))
    assert check.passed is passed
    assert word in check.detail


@pytest.mark.parametrize(
    ("outside", "held", "white", "passed", "word"),
    [
        (right(100), right(100), right(100), True, ""),
        (right(96), right(100), right(100), True, ""),  # 2 points, but chance
        (right(95), right(100), right(100), False, "gradients mislead"),
        (right(190), right(100), right(100), True, ""),
        (right(100), right(112), right(100), False, "too weak"),
        (right(100), right(110), right(100), True, ""),
        # as many won as lost
        (right(100, start=50), right(100), right(100), True, ""),
    ],
)
def test_no_better(outside, held, white, passed, word):
    check = checks.no_better("somebody", outside, held, white)
    assert check.passed is passed
    assert word in check.detail
    assert check.detail.startswith("somebody leaves ")


def test_with_many_images_a_fifth_of_a_point_counts():
    held = right(5000, 10000)
    assert checks.no_better("a", right(4980, 10000), held, held).passed
    assert not checks.no_better("a", right(4979, 10000), held, held).passed
