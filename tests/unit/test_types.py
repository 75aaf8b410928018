"""Numbers as people write them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import robustdist
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.types import NORMS, check_count, parse_number


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("8/255", 8 / 255),
        (" 8 / 255 ", 8 / 255),
        ("-8/255", -8 / 255),
        ("0.5/255", 0.5 / 255),
        ("1/0.5", 2.0),
        ("0.3", 0.3),
        (".3", 0.3),
        ("1e-3", 0.001),
        ("3", 3.0),
        ("0", 0.0),
        ("1/3", 1 / 3),
        (0.3, 0.3),
        (1, 1.0),
        (Fraction(8, 255), 8 / 255),
        (np.float64(0.25), 0.25),
        (torch.tensor(0.25), 0.25),
        (math.inf, math.inf),  # whether it makes sense is for the option to say
    ],
    ids=str,
)
def test_numbers(written, value):
    parsed = parse_number(written, "eps")
    assert type(parsed) is float
    assert parsed == value


@pytest.mark.parametrize("numerator", range(0, 256, 5))
def test_fractions_are_rounded_once(numerator):
    assert parse_number(f"{numerator}/255", "eps") == numerator / 255


@pytest.mark.parametrize(
    "written",
    [
        "", " ", "eight", "8/255/2", "8/0", "8//255", "/255", "8/", "8 255", "0. 3", "8,255", "1/2 3", "2*3", "nan",
        "inf", "1e400", 10**400, None, True, False, [0.3], (8, 255), {"a": 1}, 1j, torch.ones(2), object,
    ],
    ids=lambda value: repr(value)[:12],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_name(written):
    with pytest.raises(UsageError, match=r"^step_size=.* is not a number: write a decimal or a fraction such as 8/255"):
        parse_number(written, "step_size")


def test_the_message_shows_what_was_written():
    with pytest.raises(UsageError, match="eps='8 255'"):
        parse_number("8 255", "eps")


@pytest.mark.parametrize("value", [1, 7, 10**9])
def test_counts(value):
    assert check_count(value, "steps") == value


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, "3", None, math.nan], ids=repr)
def test_what_is_no_count_is_refused_by_name(value):
    with pytest.raises(UsageError, match=r"^restarts=.* must be a whole number of at least 1"):
        check_count(value, "restarts")


def test_norms_are_spelled_as_in_the_configs():
    assert NORMS == ("linf", "l2", "l1")


def test_errors_and_warnings_can_be_caught_as_the_usual_kinds():
    assert issubclass(UsageError, ValueError)
    assert issubclass(RobustDistWarning, UserWarning)
    assert robustdist.UsageError is UsageError
    assert robustdist.RobustDistWarning is RobustDistWarning
