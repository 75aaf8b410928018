"""The leaderboard row: RobustBench's fields, nothing claimed that was not measured."""

from __future__ import annotations

import json

import pytest

from robustdist.errors import UsageError
from robustdist.report import AttackScore, Check, leaderboard_row, write_report
from robustdist.report.leaderboard import FIELDS, checked_row, radius_string

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
    assert row["unreliable"] is False
    assert {name for name, value in row.items() if value is None} == set(FIELDS) - {"eps", "clean_acc", "unreliable"}


def test_the_accuracy_under_autoattack_is_there_only_if_it_ran_as_published():
    weaker = AttackScore(101, 1.0, {"attack": "PGD"})
    for change, expected in (({}, "60.50"), ({"version": "plus"}, None), ({"steps": 10}, None)):
        attacks = {"pgd": weaker, "aa": AttackScore(121, 1.0, STANDARD | change)}
        assert leaderboard_row(make_result(attacks=attacks))["autoattack_acc"] == expected


@pytest.mark.parametrize(("passed", "unreliable"), [(True, False), (None, False), (False, True)])
def test_a_failed_check_makes_it_unreliable(passed, unreliable):
    checks = {"logits": Check(True, ""), "transfer": Check(passed, "")}
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
