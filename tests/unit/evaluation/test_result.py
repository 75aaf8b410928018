"""What an evaluation hands on, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from robustdist.attacks import FGSM, PGD, Attack
from robustdist.errors import UsageError
from robustdist.evaluation import RobustTally
from robustdist.evaluation.findings import Findings
from robustdist.report import EvaluationResult

from .support import NUM_CLASSES, Breaks, Echo, images, tally_of

# --- the result


def test_the_result_says_what_was_done_and_fits_into_json(task):
    tally = tally_of({"pgd": PGD(eps="8/255", steps=2, seed=7), "fgsm": FGSM(eps="8/255")}, *task)
    result = tally.result()
    assert result.threat_model == {"norm": "linf", "eps": 8 / 255, "bounds": [0.0, 1.0]}
    assert result.seed == 7
    assert result.attacks["pgd"].settings == PGD(eps="8/255", steps=2, seed=7).settings()
    assert all(score.seconds > 0 for score in result.attacks.values())
    report = json.loads(json.dumps(result.to_dict()))
    assert report["num_samples"] == 48
    assert report["attacks"]["pgd"]["acc"] == result.attack_acc("pgd")
    assert EvaluationResult.from_dict(report) == result


@pytest.mark.parametrize(
    "other", [PGD(eps=0.2), PGD(norm="l2", eps=0.1), PGD(eps=0.1, bounds=(0, 2)), PGD(eps=0.1, bounds=None)]
)
def test_attacks_of_different_threat_models_are_called_mixed(other):
    tally = RobustTally({"a": PGD(eps=0.1), "b": PGD(eps=0.1, steps=3), "c": other})
    assert tally.result().threat_model == {"norm": "mixed", "eps": None, "bounds": None}


def test_the_attacks_are_those_at_the_start():
    named: dict[str, Attack] = {"a": Breaks()}
    tally = RobustTally(named)
    named["late"] = Breaks()
    assert list(tally.result().attacks) == ["a"]


# --- refused

X, Y = images([0, 1]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X * 255, Y, "bounds"),
        (X - 1, Y, "bounds"),
        (torch.full_like(X, math.nan), Y, "bounds"),
        (X, Y.float(), "class indices"),
        (X, F.one_hot(Y, NUM_CLASSES), "class indices"),
        (X, Y[:1], "class indices"),
        (X, torch.tensor([0, 4]), "4 classes"),
        (X, torch.tensor([-1, 0]), "4 classes"),
        (X, [0, 1], "class indices"),
        (X[:, None].expand(2, 3, 4), Y, None),
    ],
    ids=["bytes", "centred", "nan", "float-y", "one-hot", "short-y", "large-y", "negative-y", "list-y", "fits"],
)
def test_batches_that_do_not_fit_are_refused_before_anything_is_counted(x, y, words):
    tally, module = RobustTally({"a": Breaks(), "b": PGD(steps=1)}), Echo()
    if words is None:
        assert tally.check(module, module, x, y).shape == (2, NUM_CLASSES)
    else:
        for attempt in (
            lambda: tally.check(module, module, x, y),
            lambda: tally.update(module, module, x, y, [0, 1]),
        ):
            with pytest.raises(UsageError, match=words):
                attempt()
    assert len(tally.records) == 0
    assert tally.findings == Findings()


def test_an_evaluation_without_attacks_is_refused():
    with pytest.raises(UsageError, match="attacks is empty"):
        RobustTally({})
