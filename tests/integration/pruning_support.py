"""An ordinary module, its data and its Trainer, for tests of pruning."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
)
from torch.utils.data import DataLoader, TensorDataset

from robustdist.callbacks import StructuredPruning
from robustdist.core.testing import toy_images
from tests.unit.pruning.nets import Residual

X = toy_images(8)[0]


SCHEDULE = {"kind": "cubic", "start": 0.1, "end": 0.5, "rounds": 3}


NUM_STEPS = 16


class Module(pl.LightningModule):
    """An ordinary module: nothing of robustdist."""

    def __init__(self, lr=1e-2, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = Residual(width=width, num_classes=4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]


def loader(num_samples=64, batch_size=8, shuffle=False):
    return DataLoader(TensorDataset(*toy_images(num_samples)), batch_size, shuffle=shuffle)


def pruning(**options):
    return StructuredPruning(**{"target": {"width": 0.5}, "schedule": SCHEDULE, "round_to": 1, **options})


def trainer_of(path, callbacks, max_epochs=2, **options):
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, **options}
    return pl.Trainer(
        max_epochs=max_epochs,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **options,
    )


def fitted(path, callbacks, seed=0, ckpt_path=None, data=None, **options):
    pl.seed_everything(seed)
    module = Module()
    trainer = trainer_of(path, callbacks, **options)
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return trainer, module


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step > 4
