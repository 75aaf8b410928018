"""The benchmark of AutoAttack on its smallest case: figures, file, kept weights, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from robustdist.bench import auto_attack, bench_auto_attack
from robustdist.bench.judged_nets import CASES, prepare
from robustdist.cli import main
from robustdist.errors import UsageError

FEW = {"cases": ["digits"], "num_images": 12, "steps": 3, "queries": 10}


@pytest.mark.slow
def test_figures_and_file(require, tmp_path, capsys):
    for package in ("sklearn", "pyautoattack"):
        require(package)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    out = tmp_path / "bench.json"
    judges = ["exact", "fast", "pyautoattack"]
    result = bench_auto_attack(**FEW, judges=judges, nets=str(tmp_path), out=str(out))
    assert torch.equal(torch.get_rng_state(), before)
    assert json.loads(out.read_text()) == result
    (case,) = result["cases"]
    assert [row["judge"] for row in case["rows"]] == judges
    for row in case["rows"]:
        assert 0 <= row["robust_acc"] <= case["clean_acc"] <= 1
        assert row["cpu_seconds"] > 0
    reference = case["rows"][2]
    assert (reference["ratio"], reference["disagree"]) == (1.0, 0)
    exact = case["rows"][0]
    assert exact["ratio"] == pytest.approx(exact["cpu_seconds"] / reference["cpu_seconds"])
    assert exact["disagree"] <= 2
    broken = 12 * (case["clean_acc"] - exact["robust_acc"])
    assert sum(exact["broken_by"].values()) == pytest.approx(broken)
    assert [row["survivors"] for row in case["queue"]] == [1, 2, 4, 8]
    assert case["queue"][0]["queued"] > 1.5 * case["queue"][0]["one_by_one"]
    shown = capsys.readouterr().out
    assert "pyautoattack, standard" in shown
    assert "1 survivors" in shown
    # the weights are kept and used again
    kept = torch.load(tmp_path / "digits.pt", weights_only=True)
    again = prepare("digits", 5, tmp_path)
    assert all(torch.equal(value, kept[name]) for name, value in again.net.state_dict().items())


def test_cases_and_packages_that_are_missing(monkeypatch, capsys):
    monkeypatch.setitem(CASES, "fixture", replace(CASES["fixture"], needs=("json", "no_such_package")))
    result = bench_auto_attack(["fixture"], num_images=2)
    assert result["cases"][0]["note"] == "skipped: no_such_package not installed"
    assert "skipped" in capsys.readouterr().out


def test_other_weights_are_refused(require, tmp_path):
    require("sklearn")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "digits.pt")
    with pytest.raises(UsageError, match="holds other weights"):
        prepare("digits", 5, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": ["cifar"]}, "cases=['cifar'] are unknown: choose some of fixture"),
        ({"judges": []}, "choose some of exact"),
        ({"num_images": 0}, "num_images=0"),
        ({"steps": 0}, "steps=0"),
        ({"nets": "/nowhere"}, "nets='/nowhere' is no folder"),
        ({"out": "/nowhere/at/all.json"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(options, words, monkeypatch):
    monkeypatch.setattr(auto_attack, "prepare", lambda *args: pytest.fail("prepared"))
    with pytest.raises(UsageError) as caught:
        bench_auto_attack(**{**FEW, **options})
    assert words in str(caught.value)


def test_the_command_line_knows_it(capsys):
    assert main(["bench", "autoattack", "--steps", "0"]) == 2
    assert "steps=0 must be a whole number" in capsys.readouterr().err
