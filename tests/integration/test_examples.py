"""The examples for other tasks run, and training under attack does what it is for."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import lightning.pytorch as pl
import pytest

from examples import multi_label, quantized_data, regression, structured_pruning
from robustdist.data import MNIST5kDataModule

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_multi_label(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    results = multi_label.main(max_epochs=6)
    for clean, attacked in results.values():
        assert 0 <= attacked <= clean <= 1
    assert results["adversarial"][1] > results["ordinary"][1] + 0.1


@pytest.mark.slow
def test_regression(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    results = regression.main(max_epochs=1)
    for clean, attacked in results.values():
        assert 0 < clean < attacked
    assert results["adversarial"][1] < results["ordinary"][1]


@pytest.mark.slow
def test_structured_pruning(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    results = structured_pruning.main(max_epochs=4)
    assert results["loaded"] == results["pruned"]
    assert results["pruned"][0] < 0.3 * results["dense"][0]
    assert results["pruned"][1] > 0.8


@pytest.mark.slow
def test_quantized_data(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    # images of the same shape that a package brings: FashionMNIST is not among them
    class Images(MNIST5kDataModule):
        def __init__(self, batch_size, num_train):
            super().__init__(batch_size)

    monkeypatch.setattr(quantized_data, "FashionMNISTDataModule", Images)
    results = quantized_data.main(num_train=100, max_epochs=1)
    samples = [results[f"samples, {bits} bit{'s' * (bits > 1)}"] for bits in (8, 4, 2, 1)]
    assert all(small == large < results["gradients, QSGD 4 bits"][0] for small, large, _ in samples)
    assert samples[1][0] == 50 * 784 // 2 + 25 + 24
    assert all(0 <= row[2] <= 1 for row in results.values())


@pytest.mark.parametrize("name", ["multi_label", "regression"])
def test_their_modules_know_nothing_of_attacks(name):
    # the file also trains, but no class in it uses a name of robustdist
    tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    ours = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("robustdist")
        for alias in node.names
    }
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 1
    used = {node.id for node in ast.walk(classes[0]) if isinstance(node, ast.Name)}
    assert used & ours == set()
    (cls,) = [getattr(importlib.import_module(f"examples.{name}"), node.name) for node in classes]
    assert cls.__bases__ == (pl.LightningModule,)


@pytest.mark.parametrize("name", ["multi_label", "quantized_data", "regression", "structured_pruning"])
def test_they_are_short(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 80
