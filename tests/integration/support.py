"""What the integration tests share: an ordinary module, a runner that reads results of all ranks, naive references."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from robustdist.core.testing import TinyNet, toy_images

#: Exact in binary, like pixels that are multiples of 1/256: then the order of operations cannot show.
EPS, STEP_SIZE = 1 / 16, 1 / 64


class Classifier(pl.LightningModule):
    """Knows nothing of robustdist. Keeps the inputs that its step saw."""

    def __init__(self, net: nn.Module | None = None, lr: float = 0.125, momentum: float = 0.5):
        super().__init__()
        self.net = net if net is not None else seeded_net()
        self.lr = lr
        self.momentum = momentum
        self.seen: list[Tensor] = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].detach().clone())
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Quiet(Classifier):
    """Keeps nothing: torch.compile would specialise on the length of a list."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


def seeded_net(seed: int = 0, **options: Any) -> TinyNet:
    torch.manual_seed(seed)
    return TinyNet(**options)


def trained_net(**options: Any) -> TinyNet:
    """Return a net that is right on most toy images and robust on some."""
    net = seeded_net(**options)
    x, y = toy_images(64, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.zero_grad()
    return net


class Shares(Sampler[int]):
    """Gives every process its part of each global batch: together they see what one process sees."""

    def __init__(self, num_samples: int, batch_size: int):
        self.num_samples = num_samples
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        rank, world_size = _place()
        for start in range(0, self.num_samples, self.batch_size * world_size):
            first = start + rank * self.batch_size
            yield from range(first, first + self.batch_size)

    def __len__(self) -> int:
        return self.num_samples // _place()[1]


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shares(x: Tensor, y: Tensor, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, sampler=Shares(len(x), batch_size))


def loader(*tensors: Tensor, batch_size: int = 8, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, **options)


class Memory(Logger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.entries: list[dict[str, float]] = []

    name = "memory"
    version = 0
    experiment = None

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append(dict(metrics))

    def values(self, key: str) -> list[float]:
        return [entry[key] for entry in self.entries if key in entry]


class _Collect(pl.Callback):
    def __init__(self, folder: Path, collect: Callable[[pl.Trainer, pl.LightningModule], Any]):
        self.folder = folder
        self.collect = collect

    def teardown(self, trainer, pl_module, stage):
        torch.save(self.collect(trainer, pl_module), self.folder / f"{trainer.global_rank}.pt")


def weights(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    return module.state_dict()


def make_trainer(processes: int = 1, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": processes,
        "strategy": "auto" if processes == 1 else DDPStrategy(start_method="fork"),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return pl.Trainer(**{**defaults, **options})


def run(
    folder: Path,
    module: pl.LightningModule,
    *loaders: Any,
    verb: str = "fit",
    collect: Callable[[pl.Trainer, pl.LightningModule], Any] = weights,
    processes: int = 1,
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> list[Any]:
    """Run one verb of a Trainer and return what ``collect`` returns on every rank at the end.

    The objects of forked workers do not come back, so each rank leaves a file.
    """
    results = Path(tempfile.mkdtemp(dir=folder))
    trainer = make_trainer(
        processes, callbacks=[*callbacks, _Collect(results, collect)], default_root_dir=folder, **options
    )
    extra = {} if ckpt_path is None else {"ckpt_path": str(ckpt_path)}
    quiet = {} if verb == "fit" else {"verbose": False}
    getattr(trainer, verb)(module, *loaders, **extra, **quiet)
    return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def naive_pgd(net: nn.Module, x: Tensor, y: Tensor, eps: float, step_size: float, steps: int) -> Tensor:
    """Projected gradient descent from ``x`` in the linf ball, written from the formula."""
    training = net.training
    net.eval()
    x_adv = x.clone()
    for _ in range(steps):
        x_adv.requires_grad_(True)
        loss = F.cross_entropy(net(x_adv), y, reduction="sum")
        grad = torch.autograd.grad(loss, x_adv)[0]
        x_adv = x_adv.detach() + step_size * grad.sign()
        x_adv = torch.maximum(torch.minimum(x_adv, x + eps), x - eps).clamp(0, 1)
    net.train(training)
    return x_adv


def naive_training(
    net: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    clean_weight: float,
    steps: int = 3,
    accumulate: int = 1,
    lr: float = 0.125,
    momentum: float = 0.5,
) -> None:
    """Train ``net`` on the robust loss plus ``clean_weight`` times the clean loss in plain torch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    for first in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for x, y in batches[first : first + accumulate]:
            loss = F.cross_entropy(net(naive_pgd(net, x, y, EPS, STEP_SIZE, steps)), y)
            if clean_weight:
                loss = loss + clean_weight * F.cross_entropy(net(x), y)
            (loss / accumulate).backward()
        optimizer.step()


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
