"""One rank of a training in which rank 1 fails in the fourth step; the argument is "kill", "stop" or "raise"."""

import os
import signal
import sys
from datetime import timedelta

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from robustdist.comm import QSGD
from robustdist.strategies import CompressedDDPStrategy


class Faulty(pl.LightningModule):
    def __init__(self, what: str):
        super().__init__()
        self.net = nn.Linear(64, 64)
        self.what = what

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            if self.what == "raise":
                raise ArithmeticError("this batch is too much")
            os.kill(os.getpid(), signal.SIGKILL if self.what == "kill" else signal.SIGSTOP)
        return F.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(what: str) -> None:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=CompressedDDPStrategy(QSGD(), timeout=timedelta(seconds=60 if what == "raise" else 5)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
    )
    data = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4)
    trainer.fit(Faulty(what), data)


if __name__ == "__main__":
    main(sys.argv[1])
