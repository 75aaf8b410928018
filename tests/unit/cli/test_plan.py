"""``robustdist plan``: what it finds is what a fit removes, and what it refuses is said in one line."""

from __future__ import annotations

import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from robustdist.callbacks import StructuredPruning
from robustdist.callbacks.pruning.plan import plan_of
from robustdist.core.testing import toy_images
from robustdist.errors import UsageError
from robustdist.pruning.example import num_rows, with_rows
from robustdist.pruning.plan import whole_by
from robustdist.pruning.selection import Target
from tests.unit.pruning.nets import Residual, mlp_group

MODULES = """
import lightning.pytorch as pl
import torch
from tests.unit.pruning.nets import Residual

class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Residual(width=16, num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        raise AssertionError("a plan trains nothing")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Deep(Small):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.net = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x):
        return self.net(x.flatten(1, 2)).mean(1)

class Untraceable(Small):
    def forward(self, x):
        raise RuntimeError("the sparse kernel wants a GPU")
"""

CONFIG = """
model: plan_modules.{model}
data: {{class_path: robustdist.data.DigitsDataModule, init_args: {{batch_size: 8}}}}
trainer: {{accelerator: cpu, strategy: ddp, devices: 2, max_epochs: 1}}
"""

PRUNING = """
trainer:
  callbacks+:
    - class_path: robustdist.callbacks.StructuredPruning
      init_args: {target: {macs: 0.5}, ignore: [net.conv*], round_to: 1}
"""


@pytest.fixture
def plan(command, tmp_path, monkeypatch):
    """Run the command in an empty folder, on one of the modules above."""
    (tmp_path / "plan_modules.py").write_text(MODULES)
    (tmp_path / "prune.yaml").write_text(PRUNING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(model="Small", pruning=True, *args):
        (tmp_path / "config.yaml").write_text(CONFIG.format(model=model))
        before = set(tmp_path.iterdir())
        options = ["--config", "config.yaml", *(["--config", "prune.yaml"] if pruning else []), *args]
        outcome = command("plan", *options)
        assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before
        return outcome

    return run


@pytest.mark.slow
def test_groups_and_sizes_on_the_screen(plan):
    status, out, lines = plan()
    assert (status, lines) == (0, [])
    for words in ("ranked by magnitude", "net.stem.0", "net.grouped", "ignore='net.conv*'"):
        assert words in " ".join(out.split())
    params, pruned = re.search(r"parameters +([\d,]+) +([\d,]+)", out).groups()
    dense = sum(parameter.numel() for parameter in Residual(width=16, num_classes=10).parameters())
    assert int(params.replace(",", "")) == dense > int(pruned.replace(",", ""))
    share = float(re.search(r"MACs .+? ([\d.]+)%", out).group(1))
    assert 30 < share <= 50


@pytest.mark.slow
def test_layers_by_configuration(plan):
    option = "--trainer.callbacks.target={layers: 2, heads: 1}"
    status, out, lines = plan("Deep", True, option, "--trainer.callbacks.ignore=[]")
    assert (status, lines) == (0, [])
    told = " ".join(out.split())
    assert "target={heads: 1, layers: 2}" in told
    gone = re.search(r"net.layers layers 4 -> 2 (net.layers.[123]), (net.layers.[123]) ", told).groups()
    assert len(set(gone)) == 2
    assert told.count("goes with net.layers") == 4
    status, _, lines = plan("Deep", True, "--trainer.callbacks.target={layers: 5}", "--trainer.callbacks.ignore=[]")
    assert status == 2
    assert "target layers=5 does not fit group net.layers, which can have 1 to 4" in lines[0]
    status, _, lines = plan("Small", True, "--trainer.callbacks.target={layers: 1}", "--trainer.callbacks.ignore=[]")
    assert "Small has no layers that can go" in lines[0]


@pytest.mark.slow
def test_refusals_name_the_remedy(plan):
    status, _, lines = plan("Small", False)
    assert status == 2
    assert "add configs/prune/half_macs.yaml" in lines[0]
    status, _, lines = plan("Untraceable")
    assert status == 2
    assert "the sparse kernel wants a GPU" in lines[0]
    assert "put the part that cannot be traced outside" in lines[0]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Residual(width=8, num_classes=4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_fit_by_magnitude_removes_what_the_plan_says(tmp_path):
    module, pruning = Module(), StructuredPruning({"params": 0.6}, "magnitude", schedule={"start": 0.0}, round_to=1)
    batch = toy_images(8)
    plan = plan_of(pruning, module, batch)
    assert plan.dense.params == sum(parameter.numel() for parameter in module.parameters())
    # positions of 6 x 6 images; the head sees one
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    macs = 36 * sum(part.weight.numel() for part in convolutions) + module.net.head.weight.numel()
    assert plan.dense.macs == macs
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), 8)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[pruning], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    assert sum(parameter.numel() for parameter in module.parameters()) == plan.small.params < 0.6 * plan.dense.params
    widths = {group.name: group.kept for group in plan.groups}
    assert module.net.conv1.out_channels == widths["net.conv1"]


def test_rules_by_which_groups_stay_whole():
    group = mlp_group(width=6)

    def rule(target, **options):
        return whole_by([group], Target.parse(target), **options).get("0")

    assert rule({"macs": 0.5}) is None  # the scores say
    assert rule({"macs": 0.5}, ignore=["1", "0*"]) == "ignore='0*'"
    assert rule({"macs": 0.5}, min_units=6) == "min_units=6"
    assert rule({"width": 0.9}, round_to=4) == "width 0.9 of 6, round_to=4"
    assert rule({"ffn": 4}) == "target names no channels"
    assert rule({"channels": 6}) == "target channels=6"


def test_rows_of_an_example():
    example = {"ids": torch.arange(6).view(2, 3), "length": torch.tensor(3)}
    assert num_rows(example) == 2
    larger = with_rows(example, 5)
    assert larger["ids"].tolist() == [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]
    assert larger["length"] == 3
    assert with_rows(torch.zeros(2, 1), 1).shape == (1, 1)


def test_a_plan_is_refused_like_the_fit():
    pruning = StructuredPruning({"macs": 0.5}, ignore=["fc"])
    with pytest.raises(UsageError, match="ignore='fc' matches no group"):
        plan_of(pruning, Module(), toy_images(8))
