"""The benchmark of learners, with a tiny BERT and sentences made here."""

from __future__ import annotations

import json

import pytest
import torch

from robustdist.bench import bench_learners, learners
from robustdist.errors import UsageError
from tests.bert import tiny_bert

FEW = {"num_train": 12, "num_test": 6, "epochs": 2, "seeds": [3], "rank": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ["faraway"]}, "methods=['faraway'] are unknown: choose some of full, learners, primed, lora"),
        ({"seeds": []}, "seeds is empty"),
        ({"rank": 0}, "rank=0"),
        ({"priming_epochs": 2}, "priming_epochs=2 must be below epochs=2"),
        ({"num_test": 3}, "num_test=3 must be an even number"),
        ({"out": "/nowhere/at/all.json"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(options, words, monkeypatch, source, folder):
    monkeypatch.setattr(learners, "_run", lambda *args: pytest.fail("trained"))
    with pytest.raises(UsageError) as caught:
        bench_learners(folder, **{"source": source, **FEW, **options})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_figures_and_file(tmp_path, source, folder, capsys):
    path = tmp_path / "learners.json"
    options = {"source": source, "out": str(path), **FEW}
    keys = ["full", "learners", "primed", "lora", "bitfit", "freeze_ffn", "far"]
    result = bench_learners(folder, **options, methods=keys)
    assert json.loads(path.read_text()) == result
    assert str(tmp_path.parent) not in path.read_text()  # names no place of this machine
    runs = {run["method"]: run for run in result["runs"]}
    assert list(runs) == keys
    model = tiny_bert(vocab_size=100, num_labels=2)
    # two layers of width 16 with an FFN of 32, pooler and head beside them
    head, attention = 16 * 16 + 16 + 2 * 16 + 2, 2 * 4 * (16 * 16 + 16)
    pairs = 2 * (4 * 2 * 16 * 2 + 2 * 2 * (16 + 32))
    biases = sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias"))
    expected = {
        "full": sum(p.numel() for p in model.parameters()),
        "learners": head + pairs,
        "primed": head + pairs,
        "lora": head + 2 * 2 * 2 * 16 * 2,
        "bitfit": biases + 16 * 16 + 2 * 16,
        "freeze_ffn": head + attention,
        "far": sum(p.numel() for p in model.parameters()) - 2 * (32 - 3) * (16 + 1 + 16),
    }
    assert {key: run["trained_last"] for key, run in runs.items()} == expected
    assert {key: run["trained_first"] for key, run in runs.items()} == {**expected, "primed": head + pairs + attention}
    assert all(run["merge_changes_logits_by"] < 1e-5 for run in runs.values())
    for run in runs.values():
        assert run["accuracy"] == pytest.approx(sum(run["domains"].values()) / 4)
    gain = runs["primed"]["accuracy"] - runs["learners"]["accuracy"]
    assert result["verdict"]["gain_by_priming"]["mean"] == pytest.approx(gain)
    assert result["verdict"]["holds"] == (gain > 0)
    assert "priming against none" in capsys.readouterr().out
    # what is there is not measured again, and random streams outside are left alone
    state = torch.get_rng_state()
    assert bench_learners(folder, **options)["runs"] == result["runs"]
    more = bench_learners(folder, **{**options, "seeds": [3, 4], "methods": ["bitfit"]})
    assert torch.equal(torch.get_rng_state(), state)
    assert more["runs"][:-1] == result["runs"]
    repeated = bench_learners(folder, source=source, **{**FEW, "seeds": [4]}, methods=["bitfit"])
    assert repeated["runs"][0]["domains"] == more["runs"][-1]["domains"]
    with pytest.raises(UsageError, match="holds something else"):
        bench_learners(folder, **{**options, "rank": 3})


def test_the_verdict_takes_the_seeds_that_both_have():
    rows = [("learners", 0, 0.8), ("learners", 1, 0.7), ("primed", 0, 0.9), ("primed", 2, 0.1), ("full", 0, 1.0)]
    runs = [{"method": method, "seed": seed, "accuracy": accuracy} for method, seed, accuracy in rows]
    verdict = learners._verdict(runs)
    assert verdict["seeds"] == [0]
    assert verdict["gain_by_priming"]["mean"] == pytest.approx(0.1)
    assert verdict["holds"]
    assert learners._verdict(runs[:2]) is None
