"""The benchmarks of what pruning costs, as small as they go."""

from __future__ import annotations

import json

import pytest

from robustdist.bench import bench_prune_accuracy, bench_prune_text, prune_accuracy, prune_text
from robustdist.errors import UsageError

FEW = {"num_train": 24, "num_val": 4, "num_test": 6, "dense_epochs": 1, "epochs": 2, "seeds": [3]}


@pytest.mark.parametrize("bench", [bench_prune_accuracy, bench_prune_text])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ["magic"]}, "methods=['magic'] are unknown: choose some of dense, taylor"),
        ({"seeds": []}, "seeds is empty"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_wrong_options(bench, options, words):
    with pytest.raises(UsageError) as refused:
        bench(**options)
    assert words in str(refused.value)


@pytest.mark.slow
def test_digits_by_how_they_are_tuned(tmp_path, monkeypatch, capsys):
    out = tmp_path / "digits.json"
    few = {"epochs": 1, "tuning_epochs": 1, "seeds": [3], "out": str(out)}
    result = bench_prune_accuracy(methods=["dense", "clean"], **few)
    assert json.loads(out.read_text()) == result
    dense, clean = result["rows"]
    assert clean["params"]["mean"] < 0.3 * dense["params"]["mean"]
    assert dense["seeds"] == clean["seeds"] == [3]
    assert f"{clean['pgd20_acc']['mean']:.3f}" in capsys.readouterr().out
    # what a file holds is not measured again
    monkeypatch.setattr(prune_accuracy, "_run", lambda *_: pytest.fail("measured again"))
    assert bench_prune_accuracy(methods=["dense", "clean"], **few)["rows"] == result["rows"]


@pytest.mark.slow
def test_text_with_a_mix_of_domains(tmp_path, folder, source, monkeypatch):
    out = tmp_path / "text.json"
    result = bench_prune_text(folder, source, methods=["dense", "dro"], out=str(out), **FEW)
    assert json.loads(out.read_text()) == result
    dense, mixed = result["rows"]
    assert mixed["encoder_params"]["mean"] < dense["encoder_params"]["mean"]
    assert mixed["worst"]["mean"] <= mixed["accuracy"]["mean"]
    ratios = {run["method"]: run["ratios"] for run in result["runs"]}
    assert ratios["dense"] is None
    assert sum(ratios["dro"].values()) == pytest.approx(1)
    monkeypatch.setattr(prune_text, "_run", lambda *_: pytest.fail("measured again"))
    assert bench_prune_text(folder, source, methods=["dense", "dro"], out=str(out), **FEW)["rows"] == result["rows"]
