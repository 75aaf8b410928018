from __future__ import annotations

import math

import pytest
import torch
from rich.console import Console

from robustdist.report import AttackScore, Check, comparison_table, evaluation_table, wilson_interval
from robustdist.report.text import (
    checks_text,
    eps_text,
    exact_text,
    seconds_text,
    setting_text,
    short_settings,
    threat_model_text,
)

from .conftest import NASTY, make_result


def text(table, width=80, **options):
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(("successes", "trials"), [(1, 1), (3, 7), (500, 1000), (9999, 10000), (1, 100000)])
def test_wilson_ends_solve_the_score_equation(successes, trials):
    # the interval is the set of p with |p_hat - p| <= z sqrt(p (1 - p) / n): its ends are roots of a quadratic
    z = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.975, dtype=torch.float64)).item()
    for end in wilson_interval(successes, trials):
        if end in (0.0, 1.0):
            continue
        assert abs(successes / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials), rel=1e-5)


def test_wilson_matches_published_values():
    # roots of (1 + z^2/n) p^2 - (2 p_hat + z^2/n) p + p_hat^2 = 0 with z = 1.959964
    for successes, trials in ((8, 10), (81, 263), (15, 148)):
        share, weight = successes / trials, 1.959964**2 / trials
        half_b = (2 * share + weight) / 2
        root = math.sqrt(half_b**2 - (1 + weight) * share**2)
        expected = ((half_b - root) / (1 + weight), (half_b + root) / (1 + weight))
        assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-12)
    # Newcombe, "Two-sided confidence intervals for the single proportion", table I
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@pytest.mark.parametrize("trials", [1, 10, 10000])
def test_wilson_at_the_ends(trials):
    low, high = wilson_interval(0, trials)
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(1.959964**2 / (trials + 1.959964**2))
    assert wilson_interval(trials, trials) == pytest.approx((1 - high, 1), abs=1e-12)
    assert all(0 <= end <= 1 for end in (*wilson_interval(0, trials), *wilson_interval(trials, trials)))


def test_wilson_without_trials_knows_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("eps", "expected"),
    [(8 / 255, "8/255"), (0.5 / 255, "0.5/255"), (0.2, "0.2"), (0.1, "0.1"), (1, "1"), (0, "0"), (math.pi, "3.142")],
)
def test_eps_as_people_write_it(eps, expected):
    assert eps_text(eps) == expected


def test_threat_model_in_words():
    assert threat_model_text({"norm": "l2", "eps": 0.5, "bounds": None}) == (
        "the change may be at most 0.5 long over the whole image (l2)"
    )
    assert threat_model_text({"norm": "l1", "eps": 12.0, "bounds": [0, 255]}).endswith("12 (l1), within [0, 255]")
    assert "differs" in threat_model_text({"norm": "mixed", "eps": None, "bounds": None})
    assert threat_model_text({"norm": "patch", "size": 5}) == "norm=patch, size=5"


def test_settings_are_short():
    settings = {"attack": "PGD", "norm": "linf", "eps": 8 / 255, "steps": 20, "restarts": 1, "targeted": True}
    assert short_settings(settings) == "PGD eps=8/255 steps=20 targeted"
    assert short_settings({"attack": "TorchAttack", "name": "CW", "steps": 50}) == "CW steps=50"
    assert short_settings({}) == ""
    assert setting_text("mean", [0.49139968, 0.5]) == "[0.4914, 0.5]"
    assert seconds_text(math.nan) == "-"


def test_evaluation_table(result):
    short = make_result(attacks={name: score for name, score in result.attacks.items() if name != NASTY})
    assert all(len(line) <= 80 for line in text(evaluation_table(result, "A title")).splitlines())
    lines = text(evaluation_table(short, "A title")).splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert rows["A"].strip() == "A title"
    assert rows["clean"].split()[1] == "95.0"
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(121, 200))
    assert rows["pgd20"].split() == ["pgd20", "60.5", f"{low}-{high}", "135", "PGD", "eps=8/255", "steps=20"]
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(119, 200))
    assert rows["worst"].split()[:5] == ["worst", "case", "59.5", f"{low}-{high}", "135"]
    assert "200 samples" in rows["200"]
    assert "1 of 2 checks FAILED: budget" in rows["1"]


def test_checks_that_pass_are_said_briefly(result):
    one = {"gradient": result.checks["gradient"]}
    assert "1 check passed" in text(evaluation_table(make_result(checks=one), ""))
    two = one | {"logits": result.checks["gradient"]}
    assert "all 2 checks passed" in text(evaluation_table(make_result(checks=two), ""))
    assert "check" not in text(evaluation_table(make_result(checks={}), ""))


def test_comparison_table(comparison):
    attacks = dict(list(comparison["adversarial training"].attacks.items())[:2])
    comparison["adversarial training"] = make_result(attacks={**attacks, "apgd": AttackScore(120, 1.0, {})})
    comparison["ordinary training"] = make_result(drop=100, attacks=dict(list(attacks.items())[:2]))
    output = text(comparison_table(comparison, {"adversarial training": 318.2}, "adversarial training"))
    lines = output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    head, _, ordinary, adversarial = (line.split() for line in lines[1:5])
    assert head == ["model", "clean", "fgsm", "pgd20", "apgd", "worst", "case", "training", "s"]
    assert ordinary == ["ordinary", "training", "95.0", "75.0", "60.5", "-", "9.5", "-"]
    assert adversarial == ["adversarial", "training", "95.0", "75.0", "60.5", "60.0", "59.5", "318"]


def test_comparison_table_without_training_times(comparison):
    assert "training s" not in text(comparison_table(comparison, {}))


def test_tables_are_plain_text_away_from_a_terminal(result, comparison):
    for table in (evaluation_table(result, NASTY), comparison_table(comparison, {}, "ordinary training")):
        output = text(table, width=300)
        assert "\x1b" not in output
        assert NASTY in output  # not read as markup
        assert "\x1b[1" in text(table, force_terminal=True, color_system="standard")


def test_tables_without_samples():
    empty = make_result(num_samples=0, num_clean=0, drop=119, attacks={})
    assert "0.0-100.0" in text(evaluation_table(empty, "nothing"))
    assert "0.0" in text(comparison_table({"model": empty}, {}))


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ([], ""),
        ([True], "1 check passed"),
        ([True, True], "all 2 checks passed"),
        ([True, None], "1 check passed, 1 not run"),
        ([True, True, None], "all 2 checks that were run passed, 1 not run"),
        ([True, False, None], "1 of 2 checks FAILED: c1, 1 not run"),
    ],
)
def test_checks_that_were_not_run_are_not_counted_as_passed(verdicts, words):
    checks = {f"c{place}": Check(passed, "") for place, passed in enumerate(verdicts)}
    result = make_result(checks=checks)
    assert checks_text(result) == words
    if words:
        shown = " ".join(text(evaluation_table(result, "T"), width=200).split())
        assert words in shown
        assert "the worst case is an upper bound" in shown


def test_a_radius_is_exact_beside_its_short_form():
    assert exact_text(8 / 255) == "8/255 = 0.03137254901960784"
    assert exact_text(0.031) == "0.031"
    assert exact_text(0.0314159265) == "0.03142 = 0.0314159265"
