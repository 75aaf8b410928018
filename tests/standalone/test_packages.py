"""Fresh interpreters: both Lightning packages, and checkpoints that need nothing of ours."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = [pytest.mark.standalone, pytest.mark.timeout(180)]

MODULE = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(144, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(32, 1, 6, 6, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(32) % 4), batch_size=8)


QUIET = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False}
"""

TRAIN = """
from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.objectives import DAT

attack = PGD(eps=0.1, steps=2)
evaluation = RobustEvaluation({"pgd": attack})
module = Net()
trainer = pl.Trainer(**QUIET, callbacks=[AdversarialTraining(DAT(1.0), attack), evaluation], default_root_dir=".")
trainer.fit(module, data(), data())
trainer.save_checkpoint("trained.ckpt")
torch.save({"logits": module.eval()(next(iter(data()))[0]), "acc": evaluation.result.robust_acc}, "expected.pt")
print("package:", type(trainer).__module__.split(".")[0], "samples:", evaluation.result.num_samples)
"""


def python(folder, *parts):
    script = folder / "script.py"
    script.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )


def test_a_checkpoint_loads_strictly_where_robustdist_is_not_imported(tmp_path):
    trained = python(tmp_path, "import lightning.pytorch as pl", MODULE, TRAIN)
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert "package: lightning samples: 32" in trained.stdout

    loaded = python(
        tmp_path,
        "import lightning.pytorch as pl",
        MODULE,
        """
        import sys
        found = torch.load("trained.ckpt", weights_only=True)
        module = Net()
        module.load_state_dict(found["state_dict"], strict=True)
        again = Net.load_from_checkpoint("trained.ckpt", strict=True)
        expected = torch.load("expected.pt")["logits"]
        for restored in (module, again):
            assert torch.equal(restored.eval()(next(iter(data()))[0]), expected)
        # training goes on in an ordinary Trainer
        trainer = pl.Trainer(**{**QUIET, "max_epochs": 2}, enable_checkpointing=False)
        trainer.fit(Net(), data(), data(), ckpt_path="trained.ckpt")
        assert trainer.global_step == 8
        assert not [name for name in sys.modules if name.split(".")[0] == "robustdist"]
        print("loaded")
        """,
    )
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout.strip().endswith("loaded")


def test_the_other_package_works_when_everything_comes_from_it(tmp_path):
    outcome = python(tmp_path, "import pytorch_lightning as pl", MODULE, TRAIN)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert "package: pytorch_lightning samples: 32" in outcome.stdout
    assert torch.load(tmp_path / "trained.ckpt")["pytorch-lightning_version"]


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_module_of_the_other_package_is_refused_with_the_remedy(tmp_path, verb):
    outcome = python(
        tmp_path,
        "import lightning.pytorch",
        "import pytorch_lightning as pl",
        MODULE,
        f"""
        from robustdist.callbacks import AdversarialTraining, RobustEvaluation
        from robustdist.errors import UsageError

        callback = AdversarialTraining() if "{verb}" == "fit" else RobustEvaluation()
        try:
            callback.setup(lightning.pytorch.Trainer(**QUIET, callbacks=[callback]), Net(), "{verb}")
        except UsageError as error:
            print("refused:", error)
        """,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    message = outcome.stdout[outcome.stdout.index("refused:") :]
    assert "Net derives from pytorch_lightning" in message
    assert "import lightning.pytorch as pl" in message
