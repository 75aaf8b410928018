"""The final table of a pruning: what it says of a fit is what happened in it."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from robustdist.core.testing import toy_images
from robustdist.errors import UsageError
from robustdist.pruning import compile_recipe, discover
from robustdist.pruning.report import dense_shell, file_bytes, layer_widths, regrown
from tests.integration.pruning_support import Module, loader, pruning, size, trainer_of
from tests.unit.pruning.nets import Residual

NUM_BATCHES = 8


def reported(path, **options):
    fit = {key: options.pop(key) for key in ("devices", "strategy", "max_epochs") if key in options}
    torch.manual_seed(0)
    module = Module()
    trainer = trainer_of(path, [pruning(report_dir=str(path / "report"), **options)], **fit)
    trainer.fit(module, loader(), loader())
    return module, json.loads((path / "report" / "pruning.json").read_text())


def saved_bytes(module):
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return len(buffer.getvalue())


def macs(module):
    """Positions of 6 x 6 images times weights; the head sees one position."""
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return 36 * sum(part.weight.numel() for part in convolutions) + module.net.head.weight.numel()


@pytest.mark.slow
def test_figures_of_a_fit(tmp_path, capsys):
    module, content = reported(tmp_path, max_epochs=4)
    dense = Module()
    for name, model in (("dense", dense), ("small", module)):
        sizes = content["sizes"][name]
        assert (sizes["params"], sizes["macs"], sizes["file_bytes"]) == (size(model), macs(model), saved_bytes(model))
        assert set(sizes["cpu_ms"]) == {"1", "32"}
        assert all(value > 0 for value in sizes["cpu_ms"].values())
    widths = {layer["name"]: (layer["outputs"], layer["inputs"]) for layer in content["layers"]}
    assert widths["net.conv1"] == ([8, 4], [8, 4])
    assert widths["net.head"] == ([4, 4], [128, 64])
    # cubic in three rounds from 0.1 to 0.5 of 32 steps; the last of them has the cost of what is left
    steps = [entry["step"] for entry in content["schedule"]]
    assert steps == sorted(steps)
    assert len(steps) == 3
    assert content["schedule"][-1]["params"] == size(module)
    assert content["schedule"][-1]["macs"] == macs(module)
    # validated after 8, 16, 24 and 32 steps, the units gone after 16
    assert [entry["phase"] for entry in content["evaluations"]] == ["masked", "small", "small", "small"]
    phases = content["metrics"]["val_acc"]
    assert {phase: found["step"] for phase, found in phases.items()} == {"after_removal": 16, "after_tuning": 32}
    assert phases["after_tuning"]["value"] == content["evaluations"][-1]["metrics"]["val_acc"]
    assert (tmp_path / "report" / "pruning.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for words in ("net.conv1", "8 -> 4", f"{size(dense):,}", "CPU ms, batch 32", "val_acc"):
        assert words in printed


@pytest.mark.slow
def test_accuracies_before_the_first_mask(tmp_path):
    _, content = reported(tmp_path, max_epochs=4, schedule={"start": 0.6})
    assert [entry["phase"] for entry in content["evaluations"]] == ["dense", "dense", "small", "small"]
    phases = content["metrics"]["val_acc"]
    assert {phase: found["step"] for phase, found in phases.items()} == {
        "dense": 2 * NUM_BATCHES,
        "after_removal": 3 * NUM_BATCHES,
        "after_tuning": 4 * NUM_BATCHES,
    }


def test_without_a_report(tmp_path, capsys):
    module = Module()
    trainer_of(tmp_path, [pruning(report=False, report_dir=str(tmp_path / "report"))]).fit(module, loader())
    assert size(module) < size(Module())
    assert not (tmp_path / "report").exists()
    assert "CPU ms" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_fit_reports_all_of_it(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    callbacks = [pruning(report_dir=str(tmp_path / "whole")), saved]
    trainer_of(tmp_path, callbacks, max_epochs=4, enable_checkpointing=True).fit(Module(), loader(), loader())
    callbacks = [pruning(report_dir=str(tmp_path / "resumed"))]
    # after the removal: the dense module is never trained here
    checkpoint = tmp_path / "step=24.ckpt"
    trainer_of(tmp_path, callbacks, max_epochs=4).fit(Module(), loader(), loader(), ckpt_path=checkpoint)
    whole, resumed = (json.loads((tmp_path / name / "pruning.json").read_text()) for name in ("whole", "resumed"))
    for content in (whole, resumed):
        for sizes in content["sizes"].values():
            assert sizes.pop("cpu_ms")
    assert resumed == whole


@pytest.mark.slow
def test_a_model_that_cannot_run_on_a_copy_loses_only_its_table(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr("robustdist.callbacks.pruning.report.compared", fail)
    module, content = reported(tmp_path)
    assert size(module) < size(Module())
    assert content["sizes"] is None
    assert "no kernel for this device" in content["not_measured"]
    assert "sizes are missing" in capsys.readouterr().out


@pytest.mark.slow
def test_one_report_of_two_processes(tmp_path):
    module, content = reported(tmp_path, devices=2, strategy="robust_ddp_fork", max_epochs=4)
    assert content["sizes"]["small"]["params"] == size(module)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["pruning.json", "pruning.png"]


def test_wrong_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file: choose a folder"):
        pruning(report_dir=str(tmp_path / "file"))


def test_the_dense_network_grown_again():
    dense, x = Residual(width=8).eval(), toy_images(2)[0]
    shell = dense_shell(dense)
    assert all(tensor.untyped_storage().nbytes() <= 8 for tensor in shell.parameters())
    groups = discover(dense, x)
    small = copy.deepcopy(dense)
    recipe = compile_recipe(small, groups, {"conv1": [0, 3, 5]})
    recipe.apply(small)
    grown = regrown(shell, small, recipe)
    assert {name: tensor.shape for name, tensor in grown.named_parameters()} == {
        name: tensor.shape for name, tensor in dense.named_parameters()
    }
    kept = [1, 2, 4, 6, 7]
    assert torch.equal(grown.conv1.weight[kept], dense.conv1.weight[kept])
    assert torch.equal(grown.conv2.weight[:, kept], dense.conv2.weight[:, kept])
    assert torch.equal(grown.conv1.weight[3], small.conv1.weight[3])
    assert grown(x).shape == (2, 3)
    assert file_bytes(grown) == saved_bytes(dense) > file_bytes(small) == saved_bytes(small)
    by_name = {layer.name: layer for layer in layer_widths(recipe, small)}
    assert by_name["conv1"].outputs == (8, 5)
    assert by_name["conv1"].inputs == (8, 8)
    assert by_name["conv2"].inputs == (8, 5)
