"""Saved adversarial examples: what is in the file, and what is measured from it."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.evaluation import load_examples, remeasure
from robustdist.evaluation.saved import agrees, from_8bit, save_examples, save_part, to_8bit
from robustdist.report import AttackScore, EvaluationResult, SavedScore

from .support import Echo, images


def parts_in(folder, x: Tensor, labels: Tensor, chunks, loader=0) -> list:
    paths = []
    for place, rows in enumerate(chunks):
        rows = torch.tensor(rows)
        path = folder / f"part{loader}-{place}.pt"
        save_part(path, x[rows], torch.full((len(rows),), loader), rows, labels[rows])
        paths.append(path)
    return paths


X, Y = images([0, 1, 2, 3, 0]), torch.tensor([0, 1, 2, 3, 1])  # the last one is wrong


@pytest.fixture(params=["safetensors", "torch"])
def kind(request, monkeypatch, require):
    """Both file formats."""
    if request.param == "safetensors":
        require("safetensors")
    else:
        monkeypatch.setattr("robustdist.evaluation.saved.find_spec", lambda name: None)
    return request.param


def test_the_file_holds_each_image_once_in_order(tmp_path, kind):
    parts = parts_in(tmp_path, X, Y, [[3, 1], [0, 4, 2], [1]])
    path = save_examples(tmp_path, parts, (0.0, 1.0))
    assert path.suffix == (".safetensors" if kind == "safetensors" else ".pt")
    saved = load_examples(path)
    assert torch.equal(saved.x_adv, X)
    assert saved.x_adv.dtype == torch.float32
    assert saved.id.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(saved.label, Y)
    assert saved.loader.tolist() == [0] * 5
    assert torch.equal(saved.x_adv_8bit, to_8bit(X, (0.0, 1.0)))
    assert saved.bounds.tolist() == [0.0, 1.0]


def test_loaders_have_ids_of_their_own(tmp_path):
    parts = [*parts_in(tmp_path, X, Y, [[1, 0]], loader=1), *parts_in(tmp_path, X, Y, [[2, 0]])]
    saved = load_examples(save_examples(tmp_path, parts, None))
    assert list(zip(saved.loader.tolist(), saved.id.tolist(), strict=True)) == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert saved.x_adv_8bit is None
    assert saved.bounds.numel() == 0


def test_only_the_images_that_were_counted_are_in_the_file(tmp_path):
    earlier = parts_in(tmp_path, X, Y, [[3, 1], [0, 4, 2]])
    again = parts_in(tmp_path, X.flip(1), Y, [[1]], loader=1)  # other pixels
    content = torch.load(again[0], weights_only=True)
    torch.save(content | {"loader": torch.tensor([0])}, again[0])
    path = save_examples(tmp_path, [*earlier, *again], (0.0, 1.0), [(0, 0), (0, 1), (0, 2), (1, 4)])
    saved = load_examples(path)
    assert saved.id.tolist() == [0, 1, 2]
    assert torch.equal(saved.x_adv, torch.stack([X[0], X[1].flip(0), X[2]]))
    score = remeasure(Echo(), path)
    assert (score.num_samples, score.num_right, score.num_right_8bit) == (3, 2, 2)


@pytest.mark.parametrize(
    ("right", "total", "passed"), [(2, 5, True), (3, 5, False), (2, 4, False), (3, 4, False), (None, 5, None)]
)
def test_saved_examples_are_held_against_the_evaluation(right, total, passed):
    attack = {"pgd": AttackScore(2, 1.0, {})}
    result = EvaluationResult(num_samples=5, num_clean=4, num_robust=2, attacks=attack, threat_model={})
    # the 8-bit version has a number of its own
    found = agrees(SavedScore("x.pt", total, right, 0), result)
    assert found.passed is passed
    assert found.detail.startswith("x.pt: ")


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 255.0), (-1.0, 1.0)])
def test_rounding_goes_to_the_nearest_level_and_stays_in_range(bounds):
    low, high = bounds
    x = low + (high - low) * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    levels = to_8bit(x, bounds)
    assert levels.dtype == torch.uint8
    grid = low + (high - low) * torch.arange(256, dtype=torch.float64) / 255
    nearest = (x.double()[:, None] - grid).abs().amin(1)
    assert torch.allclose((from_8bit(levels, bounds).double() - x).abs(), nearest, atol=1e-5)
    assert torch.equal(to_8bit(from_8bit(levels, bounds), bounds), levels)
    assert to_8bit(torch.tensor([low - 1e-6, high + 1e-6]), bounds).tolist() == [0, 255]


def test_an_8bit_image_of_the_same_eps_stays_in_the_ball():
    # whole levels plus or minus 8 levels are whole levels
    x = torch.randint(0, 256, (4, 3, 5, 5)) / 255
    x_adv = (x + 8 / 255 * torch.randn(x.shape).sign()).clamp(0, 1)
    assert (from_8bit(to_8bit(x_adv, (0, 1)), (0, 1)) - x).abs().max() <= 8 / 255 + 1e-6


class Sharp(nn.Module):
    """Right on pixels that are no whole level of 8 bit, wrong on those that are."""

    def forward(self, x: Tensor) -> Tensor:
        between = ((x * 255) % 1 - 0.5).abs().flatten(1).amin(1) < 0.1
        return torch.stack([between.float(), 1 - between.float()], 1)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_both_versions_are_measured(tmp_path, batch_size):
    x = torch.full((3, 1, 2, 2), 100.5 / 255)
    path = save_examples(tmp_path, parts_in(tmp_path, x, torch.zeros(3, dtype=torch.long), [[0, 1, 2]]), (0.0, 1.0))
    assert remeasure(Sharp(), path, batch_size=batch_size) == SavedScore(path.name, 3, 3, 0)


def test_inputs_are_normalised_and_cast_as_the_model_wants_them(tmp_path, kind):
    path = save_examples(tmp_path, parts_in(tmp_path, X, Y, [[0, 1, 2, 3, 4]]), (0.0, 1.0))
    seen = []

    def forward(x):
        seen.append(x)
        return x[:, :4]

    net = Echo()
    score = remeasure(net, path, forward=forward, mean=0.5, std=0.25, dtype=torch.float64)
    assert score == SavedScore(path.name, 5, 4, 4)
    assert seen[0].dtype == torch.float64
    torch.testing.assert_close(seen[0], ((X - 0.5) / 0.25).double())
    assert remeasure(net, path, measure=False) == SavedScore(path.name, 5, None, None)


def test_the_model_stays_as_it_was(tmp_path):
    path = save_examples(tmp_path, parts_in(tmp_path, X, Y, [[0, 1]]), None)
    net = nn.Sequential(nn.Dropout(0.5), nn.Flatten()).train()
    before = torch.get_rng_state()
    assert remeasure(net, path).num_right == 2
    assert net.training
    assert torch.equal(torch.get_rng_state(), before)


class Evil:
    """Would run a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo pwned",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.pt", None, "does not exist"),
        ("a.pt", {"x_adv": torch.zeros(1)}, "lacks bounds, id, label, loader"),
        ("b.pt", {"x_adv": Evil()}, "cannot be read"),
        ("c.safetensors", b"nonsense", "is no file of saved examples"),
        ("d.pt", b"nonsense", "cannot be read"),
    ],
)
def test_other_files_are_refused_and_never_run(tmp_path, name, content, words, require):
    require("safetensors")
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UsageError, match=words):
        load_examples(path)


def test_without_safetensors_its_files_name_the_package(tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(b"")
    monkeypatch.setattr("robustdist.evaluation.saved.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        load_examples(tmp_path / "x.safetensors")
    assert "robustdist.evaluation.saved" in sys.modules
