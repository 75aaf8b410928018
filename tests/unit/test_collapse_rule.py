"""When the guard calls it a collapse, and what it refuses."""

import random

import pytest

from robustdist.attacks import PGD
from robustdist.callbacks import CatastrophicOverfittingGuard
from robustdist.core.collapse import CollapseRule, has_collapsed
from robustdist.errors import UsageError


def verdicts(accuracies, **options):
    """Judge a whole training at one radius with an attack that one step does not break."""
    rule = CollapseRule(**options)
    return [rule.judge(accuracy, accuracy, 0.0) for accuracy in accuracies]


def test_a_collapse_within_an_epoch():
    assert verdicts([0.40, 0.42, 0.05]) == [False, False, True]


def test_a_collapse_over_several_checks():
    assert verdicts([0.40, 0.42, 0.32, 0.22, 0.20]) == [False, False, False, False, True]


def test_an_ordinary_training_goes_up_and_down():
    assert not any(verdicts([0.0, 0.02, 0.10, 0.31, 0.26, 0.45, 0.38, 0.6, 0.7, 0.64, 0.8]))


def test_the_one_step_accuracy_may_rise_meanwhile():
    rule = CollapseRule()
    accuracies = [(0.40, 0.45), (0.42, 0.50), (0.05, 0.80)]
    assert [rule.judge(several, several, one) for several, one in accuracies] == [False, False, True]
    assert (rule.best, rule.best_ratio) == (0.42, pytest.approx(0.40 / 0.45))


def test_a_growing_radius_is_no_collapse():
    rule = CollapseRule()
    # nothing holds at the full radius yet, and less and less at the radius in use
    assert not any(rule.judge(0.0, several, several / 0.9) for several in (0.9, 0.7, 0.45, 0.2, 0.05))


def test_a_collapse_while_the_radius_grows():
    rule = CollapseRule()
    assert not rule.judge(0.0, 0.5, 0.55)
    assert not rule.judge(0.02, 0.4, 0.6)
    assert rule.judge(0.02, 0.2, 0.6)
    # a check that collapsed does not count as a good one
    assert rule.judge(0.1, 0.2, 0.6)
    assert (rule.best, rule.best_ratio) == (0.02, pytest.approx(0.5 / 0.55))


def test_one_step_may_run_ahead_while_the_full_radius_gains():
    # measured: Fast-BAT with the relative step on MNIST at the end of its ramp; it went on to 0.80
    rule = CollapseRule()
    assert not rule.judge(0.06, 0.60, 0.64)
    assert not rule.judge(0.156, 0.50, 0.74)
    assert not rule.judge(0.336, 0.336, 0.81)
    assert rule.best == 0.336
    # the same ratio without the gain, or with one no larger than noise
    assert rule.judge(0.336, 0.336, 0.81)
    assert rule.judge(0.43, 0.336, 0.81)


def test_a_net_that_never_held_has_not_collapsed():
    rule = CollapseRule()
    assert not any(rule.judge(several, several, 0.4) for several in (0.0, 0.02, 0.05))


def test_a_ratio_of_tiny_accuracies_means_nothing():
    rule = CollapseRule()
    assert not rule.judge(0.0, 0.04, 0.04)
    assert rule.best_ratio == 0.0
    assert not rule.judge(0.0, 0.05, 0.5)
    assert rule.best_ratio == pytest.approx(0.1)


def test_a_ratio_above_one_counts_as_one():
    rule = CollapseRule()
    assert not rule.judge(0.3, 0.3, 0.15)
    assert rule.best_ratio == 1.0


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
