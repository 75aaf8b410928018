"""The leaderboard row: RobustBench's fields, nothing claimed that was not measured."""

from __future__ import annotations

import json

import pytest

from robustdist.errors import UsageError
from robustdist.report import AttackScore, Check, leaderboard_row, write_report
from robustdist.report.leaderboard import FIELDS, checked_row, radius_string
from robustdist.report.result import CHECKS
from robustdist.report.text import bound_text

from .conftest import make_result

STANDARD = {"attack": "AutoAttack", "version": "standard", "steps": 100, "queries": 5000, "precision": "32"}


def test_the_row_has_the_fields_of_the_board_and_null_for_the_unknown():
    row = leaderboard_row(make_result(checks={}))
    assert tuple(row) == FIELDS == (
        "name", "authors", "link", "venue", "architecture", "dataset", "eps", "additional_data",
        "number_forward_passes", "clean_acc", "reported", "autoattack_acc", "footnote", "unreliable",
    )  # fmt: skip
    assert row["eps"] == "8/255"
    assert row["clean_acc"] == "95.00"
    assert {name for name, value in row.items() if value is None} == set(FIELDS) - {"eps", "clean_acc"}


def test_the_accuracy_under_autoattack_is_there_only_if_it_ran_as_published():
    weaker = AttackScore(101, 1.0, {"attack": "PGD"})
    for change, expected in (({}, "60.50"), ({"version": "plus"}, None), ({"steps": 10}, None)):
        attacks = {"pgd": weaker, "aa": AttackScore(121, 1.0, STANDARD | change)}
        assert leaderboard_row(make_result(attacks=attacks))["autoattack_acc"] == expected
    few = make_result(attacks={"aa": AttackScore(121, 1.0, STANDARD)}, checks={"classes": Check(None, "3 classes")})
    assert leaderboard_row(few)["autoattack_acc"] is None
    assert bound_text(few) == "upper bound"


ALL = {name: Check(True, "") for name in CHECKS}


@pytest.mark.parametrize(
    ("checks", "unreliable"),
    [
        (ALL, False),
        ({name: ALL[name] for name in CHECKS[:8]}, None),
        *((ALL | {name: Check(None, "")}, None) for name in ("classes", "transfer")),
        (ALL | {"transfer": Check(False, "")}, True),
        ({"logits": Check(False, ""), "transfer": Check(None, "")}, True),
        (ALL | {"saved_examples": Check(False, "")}, True),
    ],
)
def test_only_a_failed_check_makes_it_unreliable_and_only_all_of_them_make_it_reliable(checks, unreliable):
    assert leaderboard_row(make_result(checks=checks))["unreliable"] is unreliable


def test_what_the_user_knows_is_taken_over():
    known = {"name": "N", "additional_data": True, "architecture": "WRN"}
    row = leaderboard_row(make_result(), known, architecture="Net")
    assert (row["name"], row["additional_data"], row["architecture"]) == ("N", True, "WRN")
    assert leaderboard_row(make_result(), architecture="Net")["architecture"] == "Net"


def test_mixed_threat_models_have_no_radius():
    mixed = make_result(threat_model={"norm": "mixed", "eps": None, "bounds": None})
    assert leaderboard_row(mixed)["eps"] is None


@pytest.mark.parametrize(
    ("eps", "text"),
    [
        (8 / 255, "8/255"),
        (4 / 255, "4/255"),
        (0.031, "0.031"),
        (0.3, "0.3"),
        (0.5, "0.5"),
        (0.5 / 255, "0.5/255"),
        (1, "1"),
    ],
)
def test_the_radius_is_exact(eps, text):
    assert radius_string(eps) == text
    numerator, _, denominator = text.partition("/")
    assert float(numerator) / float(denominator or 1) == eps


@pytest.mark.parametrize(
    ("name", "words"), [("autors", "did you mean 'authors'"), ("zzz", "choose from name"), ("clean_acc", "is measured")]
)
def test_wrong_fields_are_refused(name, words):
    with pytest.raises(UsageError, match=words):
        checked_row({name: "x"})


def test_the_row_is_in_the_report(tmp_path):
    write_report(tmp_path, make_result(), about={"model": "Net"}, leaderboard={"venue": "here"})
    row = json.loads((tmp_path / "report.json").read_text())["leaderboard"]
    assert (row["venue"], row["architecture"], row["unreliable"]) == ("here", "Net", True)
