"""Amounts over a run: the formulas, and that they start at nothing, never fall and end with all."""

from __future__ import annotations

import itertools

import pytest

from robustdist.errors import UsageError
from robustdist.pruning.schedule import PruningSchedule

POINTS = [step / 200 for step in range(201)]


def test_one_shot_is_all_at_its_start():
    assert [PruningSchedule(start=0.5).progress(at) for at in (0.0, 0.499, 0.5, 1.0)] == [0.0, 0.0, 1.0, 1.0]
    assert PruningSchedule(start=0.0).progress(0.0) == 1.0


def test_iterative_goes_in_equal_parts():
    schedule = PruningSchedule("iterative", start=0.1, end=0.5, rounds=4)
    found = [schedule.progress(at) for at in POINTS]
    changes = [(at, now) for at, before, now in zip(POINTS[1:], found, found[1:], strict=False) if now != before]
    assert changes == [(0.2, 0.25), (0.3, 0.5), (0.4, 0.75), (0.5, 1.0)]


@pytest.mark.parametrize("rounds", [4, 1000])
def test_cubic_is_its_formula_at_the_rounds(rounds):
    schedule = PruningSchedule("cubic", start=0.25, end=0.75, rounds=rounds)
    for k in range(rounds + 1):
        t = 0.25 + 0.5 * k / rounds
        assert schedule.progress(t) == pytest.approx(1 - (1 - (t - 0.25) / (0.75 - 0.25)) ** 3, abs=1e-9)
    between = 0.25 + 0.5 * 1.5 / rounds
    assert schedule.progress(between) == pytest.approx(1 - (1 - 1 / rounds) ** 3, abs=1e-9)


@pytest.mark.parametrize("kind", ["one_shot", "iterative", "cubic"])
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_progress_never_falls_and_ends_with_all(kind, rounds):
    found = [PruningSchedule(kind, start=0.1, end=0.9, rounds=rounds).progress(at) for at in POINTS]
    assert all(0 <= before <= after <= 1 for before, after in itertools.pairwise(found))
    assert found[0] == 0
    assert found[180] == found[-1] == 1
    assert len(set(found)) == (2 if kind == "one_shot" else rounds + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "linear"}, r"kind='linear' is unknown: use one of one_shot, iterative, cubic"),
        ({"start": -1}, r"start=-1 is out of range"),
        ({"kind": "cubic", "end": 1.5}, r"end=1\.5 is out of range"),
        ({"kind": "cubic", "start": 0.6, "end": 0.6}, r"give a share in \(0\.6, 1\]"),
        ({"rounds": 0}, "rounds=0 must be"),
        ({"stop": 0.4}, "no option 'stop'"),
    ],
)
def test_wrong_input_is_named(options, message):
    with pytest.raises(UsageError, match=message):
        PruningSchedule.parse(options)
