"""Ramps of radius and step size."""

from __future__ import annotations

import math

import pytest

from robustdist.attacks import LinearRamp, Piecewise, Schedule
from robustdist.errors import UsageError


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        (LinearRamp(share=0.5), [0.0, 0.5, 1.0, 1.0, 1.0]),
        (LinearRamp(share=1.0), [0.0, 0.25, 0.5, 0.75, 1.0]),
        (LinearRamp(share=0.5, start=0.2), [0.2, 0.6, 1.0, 1.0, 1.0]),
        (LinearRamp(share=0.25, start=1.0), [1.0] * 5),
        (Piecewise([(0.25, 0.5), (0.75, 1.5)]), [0.5, 0.5, 1.0, 1.5, 1.5]),
        (Piecewise([(0.0, 1.0), (0.5, 0.0), (1.0, 2.0)]), [1.0, 0.5, 0.0, 1.0, 2.0]),
        (Piecewise([[0.5, 3]]), [3.0] * 5),
    ],
)
def test_factors(ramp, expected):
    assert isinstance(ramp, Schedule)
    assert [ramp(progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(expected)


def test_default_ramp_reaches_one_and_never_falls():
    values = [LinearRamp()(step / 100) for step in range(101)]
    assert values[0] == 0.0
    assert values[15] == pytest.approx(0.5)
    assert values[30:] == [1.0] * 71
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"share": 0.0}, "share"),
        ({"share": 1.1}, "share"),
        ({"share": -0.1}, "share"),
        ({"share": math.nan}, "share"),
        ({"start": -0.1}, "start"),
        ({"start": 1.1}, "start"),
    ],
)
def test_wrong_ramps(options, option):
    with pytest.raises(UsageError, match=rf"^{option}=.* must be in .*: it is"):
        LinearRamp(**options)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0.5, 1.0), (0.2, 1.0)],
        [(0.5, 1.0), (0.5, 2.0)],
        [(0.0, -0.1)],
        [(0.0, math.nan)],
        [(0.0, math.inf)],
    ],
)
def test_wrong_points(points):
    with pytest.raises(UsageError, match=r"^points=.* must be .* pairs with rising progress"):
        Piecewise(points)
