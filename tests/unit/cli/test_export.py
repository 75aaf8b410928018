"""``robustdist export``: from the files of a pruned training to a program that gives what the small module gives."""

from __future__ import annotations

import pytest
import torch

from robustdist.data import DigitsDataModule
from robustdist.pruning import load_pruned

MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn

class Small(pl.LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(9 * width, 10)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
"""

CONFIG = """
model: {class_path: export_modules.Small, init_args: {width: 32}}
data: {class_path: robustdist.data.DigitsDataModule}
trainer:
  accelerator: cpu
  max_epochs: 1
  limit_train_batches: 4
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: saved, filename: last}
    - class_path: robustdist.callbacks.StructuredPruning
      init_args: {target: {width: 0.5}, schedule: {start: 0.25}, bn_recalibration_batches: 0}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "export_modules.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_from_a_training_to_a_program(command, folder, require):
    require("onnxruntime")
    status, _, lines = command("fit", "--config", "config.yaml")
    assert (status, lines) == (0, [])
    checkpoint = folder / "saved" / "last.ckpt"
    from export_modules import Small

    module = load_pruned(Small, checkpoint).eval()
    assert module.net[0].out_channels == 16
    x = DigitsDataModule().parts.test.tensors[0][:7]
    # with the configuration that the training saved, the shape comes from its data
    (saved,) = (folder / "logs").rglob("config.yaml")
    arguments = ["--ckpt_path", checkpoint, "--torch-export", "net.pt2", "--onnx", "net.onnx"]
    status, out, lines = command("export", "--config", saved, *arguments)
    assert (status, lines) == (0, [])
    assert [line.split(":")[0] for line in out.splitlines() if "largest difference" in line] == ["net.onnx", "net.pt2"]
    assert torch.allclose(torch.export.load("net.pt2").module()(x), module(x), atol=1e-6)
    import onnxruntime

    session = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert abs(found - module(x).detach().numpy()).max() < 1e-4
    # without it, class and arguments come from the checkpoint, and the shape has to be said
    status, out, lines = command("export", f"--ckpt_path={checkpoint}", "--torch-export=other.pt2")
    assert status == 2
    assert "--input_shape" in lines[0]
    shape = ["--input_shape", "[1, 8, 8]"]
    status, out, lines = command("export", f"--ckpt_path={checkpoint}", "--torch-export=other.pt2", *shape)
    assert (status, lines) == (0, [])
    assert torch.equal(torch.export.load("other.pt2").module()(x), torch.export.load("net.pt2").module()(x))


@pytest.mark.slow
def test_refusals(command, folder):
    torch.save({"state_dict": {}}, "empty.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": {"path": folder}}, "foreign.ckpt")

    def refusal(*arguments):
        status, _, lines = command("export", "--config", "config.yaml", *arguments)
        assert status == 2
        assert len(lines) == 1
        return lines[0]

    assert "give --onnx F, --torch-export F or both" in refusal("--ckpt_path", "empty.ckpt")
    assert "ckpt_path=None is no file" in refusal("--onnx", "net.onnx")
    assert "config.yaml is no checkpoint" in refusal("--ckpt_path", "config.yaml", "--onnx", "net.onnx")
    assert "foreign.ckpt holds pathlib" in refusal("--ckpt_path", "foreign.ckpt", "--onnx", "net.onnx")
    missing = refusal("--ckpt_path", "empty.ckpt", "--onnx", "net.onnx", "--forward", "encoder")
    assert "forward='encoder' is no part of Small" in missing
