"""The benchmark of pruning, with a small residual net and a tiny BERT in the place of the large networks."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from robustdist.bench import bench_prune, prune
from robustdist.bench.models import ResNet
from robustdist.bench.prune_rows import Case
from robustdist.errors import UsageError
from tests.bert import tiny_bert


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"networks": ["resnet50"]}, "networks=['resnet50'] is unknown: choose some of resnet18, minilm"),
        ({"rows": []}, "rows=[] is unknown: choose some of dense, ours, torch_pruning, model_pruning"),
        ({"share": 1.0}, "share=1.0 is out of range"),
        ({"rounds": 0}, "rounds=0"),
        ({"out": "/nowhere/at/all.json"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(options, words, monkeypatch):
    monkeypatch.setattr(prune, "_measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(UsageError) as caught:
        bench_prune(**options)
    assert words in str(caught.value)


@pytest.fixture
def small_resnet(monkeypatch):
    def case(share, image_size, *_):
        def make():
            torch.manual_seed(0)
            return ResNet(width=8)

        convolutions = tuple(path for path, part in make().named_modules() if isinstance(part, nn.Conv2d))
        return Case(make, torch.rand(2, 3, image_size, image_size), share, ("channels",), convolutions)

    monkeypatch.setitem(prune._CASES, "resnet18", case)


@pytest.mark.slow
def test_figures_and_file(tmp_path, small_resnet, require, capsys):
    require("torch_pruning")
    state = torch.get_rng_state()
    path = tmp_path / "prune.json"
    result = bench_prune(out=str(path), networks=["resnet18"], image_size=16, rounds=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads(path.read_text()) == result
    rows = {row["key"]: row for row in result["rows"]}
    assert list(rows) == ["dense", "ours", "torch_pruning", "model_pruning"]
    assert [row["failure"] for row in rows.values()] == [None] * 4
    half = sum(parameter.numel() for parameter in ResNet(width=4).parameters())
    dense = sum(parameter.numel() for parameter in ResNet(width=8).parameters())
    assert [row["params"] for row in rows.values()] == [dense, half, half, dense]
    assert rows["ours"]["macs"] == rows["torch_pruning"]["macs"] < 0.3 * rows["dense"]["macs"]
    # the zeros of ModelPruning: half of the rows of the convolutions, and none of the others
    zeros = sum(p.numel() // 2 for p in ResNet(width=8).parameters() if p.dim() == 4)
    biases = sum(p.numel() for name, p in ResNet(width=8).named_parameters() if "norm" in name and "bias" in name)
    assert zeros / dense <= rows["model_pruning"]["zeros"] <= (zeros + biases) / dense + 0.01
    assert rows["ours"]["masked_error"] < 1e-5
    assert rows["ours"]["reloads"] == "yes, by a recipe"
    assert rows["ours"]["optimizer"] == rows["model_pruning"]["optimizer"] == "yes"
    assert rows["torch_pruning"]["reloads"].startswith("no: size mismatch for stem.0.weight")
    assert rows["torch_pruning"]["optimizer"].startswith("no: ")
    assert rows["dense"]["faster"]["32"]["median"] == 1.0
    printed = capsys.readouterr().out
    assert "robustdist" in printed
    assert "process CPU time" in printed


@pytest.mark.slow
def test_a_row_that_fails_is_a_result(tmp_path, small_resnet, monkeypatch, capsys):
    def broken(case):
        raise RuntimeError("cannot do this\nat all")

    monkeypatch.setitem(prune.MAKERS, "torch_pruning", ("torch-pruning", broken))
    result = bench_prune(networks=["resnet18"], rows=["torch_pruning"], image_size=16, rounds=1)
    assert [row["failure"] for row in result["rows"]] == [None, "RuntimeError: cannot do this"]
    assert "cannot do this" in capsys.readouterr().out


@pytest.mark.slow
def test_heads_and_feed_forward_units(tmp_path, require, capsys):
    require("transformers")
    require("torch_pruning")
    tiny_bert(vocab_size=100).bert.save_pretrained(tmp_path)
    options = {"networks": ["minilm"], "sequence_length": 6, "rounds": 1, "model": str(tmp_path)}
    rows = {row["key"]: row for row in bench_prune(**options)["rows"]}
    # one of two heads of 8, 16 of 32 feed-forward units, in two layers of width 16
    gone = 2 * (3 * (8 * 16 + 8) + 16 * 8 + 16 * 16 + 16 + 16 * 16)
    assert rows["ours"]["params"] == rows["torch_pruning"]["params"] == rows["dense"]["params"] - gone
    assert rows["ours"]["masked_error"] < 1e-5
