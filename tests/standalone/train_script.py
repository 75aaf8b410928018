"""Trains with a launcher that starts processes anew: ``python train_script.py STRATEGY FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Sampler, TensorDataset

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.comm import Identity
from robustdist.core.testing import TinyNet, toy_images
from robustdist.objectives import DAT
from robustdist.strategies import CompressedDDPStrategy

NUM_STEPS, BATCH_SIZE, ACCUMULATE = 20, 8, 2


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = TinyNet()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5)


class Shares(Sampler[int]):
    """Gives every process its part of each global batch."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = BATCH_SIZE // world_size
        for start in range(rank * share, self.num_samples, BATCH_SIZE):
            yield from range(start, start + share)

    def __len__(self) -> int:
        return self.num_samples // (dist.get_world_size() if dist.is_initialized() else 1)


class Saving(pl.Callback):
    """Leaves a file per rank: the objects of started processes do not come back."""

    def __init__(self, path: str):
        self.path = path

    def on_fit_end(self, trainer, pl_module):
        attack, evaluation = trainer.callbacks[:2]
        result = {
            "weights": pl_module.state_dict(),
            "counters": attack.state_dict(),
            "history": evaluation.history,
            "num_samples": evaluation.result.num_samples,
            "world_size": trainer.world_size,
        }
        torch.save(result, f"{self.path}.{trainer.global_rank}")


def main(strategy: str, path: str) -> None:
    torch.set_num_threads(1)
    processes = 1 if strategy == "auto" else 2
    chosen = {
        "auto": "auto",
        "ddp": "ddp",
        "ddp_spawn": "ddp_spawn",
        "ddp_find_unused": DDPStrategy(find_unused_parameters=True),
        "compressed": CompressedDDPStrategy(Identity()),
        "compressed_spawn": CompressedDDPStrategy(Identity(), start_method="spawn"),
    }[strategy]
    x, y = toy_images(NUM_STEPS * ACCUMULATE * BATCH_SIZE)
    data = TensorDataset(x, y)
    attack = PGD(eps=1 / 16, step_size=1 / 64, steps=3, random_start=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=chosen,
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            AdversarialTraining(DAT(clean_weight=1.0), attack),
            RobustEvaluation({"pgd": PGD(eps=1 / 16, steps=3)}),
            Saving(path),
        ],
    )
    share = BATCH_SIZE // processes
    trainer.fit(
        Classifier(),
        DataLoader(data, batch_size=share, sampler=Shares(len(data))),
        DataLoader(TensorDataset(x[:33], y[:33]), batch_size=5),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
