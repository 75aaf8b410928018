"""When the guard calls it a collapse, and what it refuses."""

import random

import pytest

from robustdist.attacks import PGD
from robustdist.callbacks import CatastrophicOverfittingGuard
from robustdist.callbacks.catastrophic_overfitting_guard import has_collapsed
from robustdist.errors import UsageError


def verdicts(accuracies, **options):
    """Judge a whole training: the best counts what did not collapse."""
    best, found = 0.0, []
    for accuracy in accuracies:
        found.append(has_collapsed(accuracy, best, **options))
        best = best if found[-1] else max(best, accuracy)
    return found


def test_a_collapse_within_an_epoch():
    assert verdicts([0.40, 0.42, 0.05]) == [False, False, True]


def test_a_collapse_over_several_checks():
    assert verdicts([0.40, 0.42, 0.32, 0.22, 0.20]) == [False, False, False, False, True]


def test_an_ordinary_training_goes_up_and_down():
    assert not any(verdicts([0.0, 0.02, 0.10, 0.31, 0.26, 0.45, 0.38, 0.6, 0.7, 0.64, 0.8]))


@pytest.mark.parametrize(
    ("accuracy", "best", "options", "expected"),
    [
        (0.25, 0.5, {}, False),  # not less than half
        (0.2499, 0.5, {}, True),
        (0.0, 0.1, {}, False),  # not more than 0.1
        (0.0, 0.11, {}, True),
        (0.35, 0.5, {"drop": 0.25}, True),
        (0.35, 0.5, {"drop": 0.25, "fall": 0.2}, False),
        (0.0, 0.01, {"fall": 0.0}, True),
        (0.0, 0.0, {"fall": 0.0}, False),
    ],
)
def test_both_conditions_count(accuracy, best, options, expected):
    assert has_collapsed(accuracy, best, **options) is expected


def test_a_lower_accuracy_is_never_a_lesser_collapse():
    draw = random.Random(0)
    for _ in range(300):
        best, drop, fall = draw.random(), draw.uniform(0.01, 0.99), draw.random()
        found = [has_collapsed(step / 100 * best, best, drop=drop, fall=fall) for step in range(101)]
        assert found == sorted(found, reverse=True)
        assert not found[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attack": 8}, "attack=8 is not an attack"),
        ({"attack": PGD(targeted=True)}, "use an untargeted attack"),
        ({"num_samples": 0}, "num_samples"),
        ({"every_n_epochs": 0}, "every_n_epochs"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"drop": 0.0}, "drop=0.0 must lie between 0 and 1"),
        ({"drop": 1.0}, "drop=1.0 must lie between 0 and 1"),
        ({"fall": -0.1}, "fall=-0.1 must be in [0, 1)"),
        ({"fall": 1.0}, "fall=1.0 must be in [0, 1)"),
        ({"action": "undo"}, "choose warn, rollback or stop"),
        ({"step_shrink": 0.0}, "step_shrink=0.0 must be in (0, 1]"),
        ({"step_shrink": 1.5}, "step_shrink=1.5 must be in (0, 1]"),
        ({"max_rollbacks": -1}, "max_rollbacks=-1"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(UsageError) as caught:
        CatastrophicOverfittingGuard(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
