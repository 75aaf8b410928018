"""Prunes a module on two started processes; every process writes what it has, and the main one what fit left it."""

import sys

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from robustdist.callbacks import StructuredPruning
from robustdist.core.testing import TinyNet, toy_images


class Classifier(pl.LightningModule):
    """A small network; writes its weights at the end of the fit."""

    def __init__(self, path: str = ""):
        super().__init__()
        self.net = TinyNet(batch_norm=True)
        self.path = path

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def on_fit_end(self):
        content = {"weights": self.state_dict(), "recipe": self.pruning_recipe.hash()}
        torch.save(content, f"{self.path}.{self.global_rank}")


def main(strategy: str, path: str) -> None:
    pl.seed_everything(0)
    module = Classifier(path)
    pruning = StructuredPruning({"width": 0.5}, schedule={"start": 0.4}, round_to=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        callbacks=[pruning],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*toy_images(48)), 8))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), f"{path}.main")


if __name__ == "__main__":
    main(*sys.argv[1:])
