"""The benchmark of accuracy against bytes on scikit-learn's digits: figures, file, plot, continuing."""

from __future__ import annotations

import json

import pytest

from robustdist.bench import bench_comm_accuracy, comm_accuracy
from robustdist.errors import UsageError

FEW = {"data": "digits", "epochs": 1, "num_test": 60, "seeds": [3], "rows": ["ddp", "int8"], "warmup": 0.5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "cifar"}, "data='cifar' is unknown: choose one of mnist5k"),
        ({"rows": ["ddp", "float8"]}, "rows=['float8'] are unknown: choose some of ddp"),
        ({"rows": []}, "choose some of ddp"),
        ({"epochs": 0}, "epochs=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown: choose one of adam, sgd"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"warmup": 1.0}, "warmup=1.0 must be a share of the steps"),
        ({"warmup": -0.1}, "warmup=-0.1"),
        ({"plot": "/nowhere/at/all.png"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(options, words, monkeypatch):
    monkeypatch.setattr(comm_accuracy, "_run", lambda *args: pytest.fail("trained"))
    with pytest.raises(UsageError) as caught:
        bench_comm_accuracy(**{**FEW, **options})
    assert words in str(caught.value)


@pytest.mark.slow
def test_figures_file_and_plot(require, tmp_path, monkeypatch):
    require("sklearn")
    require("matplotlib")
    files = {"out": str(tmp_path / "figures.json"), "plot": str(tmp_path / "plot.png")}
    result = bench_comm_accuracy(**FEW, **files)
    assert json.loads((tmp_path / "figures.json").read_text()) == result
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    plain, int8 = result["rows"]
    assert plain["ratio"] == 1
    assert 1.5 < int8["ratio"] < 1.6  # 3.7 in half of the steps
    assert (plain["name"], int8["name"]) == ("DDP, float32", "Int8, after 50 % of float32")
    assert [run["warmup_steps"] for run in result["runs"]] == [0, round(result["runs"][1]["steps"] / 2)]
    for row in (plain, int8):
        assert 0 <= row["pgd20_acc"]["mean"] <= row["clean_acc"]["mean"] <= 1
    difference = int8["clean_acc"]["mean"] - plain["clean_acc"]["mean"]
    assert int8["clean_acc"]["to_ddp"] == pytest.approx(difference)
    # goes on from the file, and refuses that of other settings
    monkeypatch.setattr(comm_accuracy, "_run", lambda *args: pytest.fail("trained again"))
    assert bench_comm_accuracy(**FEW, out=files["out"])["rows"] == result["rows"]
    with pytest.raises(UsageError, match="holds something else"):
        bench_comm_accuracy(**{**FEW, "warmup": 0.2}, out=files["out"])
