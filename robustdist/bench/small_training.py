"""One training of the small net by one objective: a cell of the table of ``robustdist bench objectives``."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist._lightning import PACKAGE, Callback, LightningModule, Trainer
from robustdist.attacks import PGD, Attack, LinearRamp
from robustdist.bench.models import small_conv_net
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard
from robustdist.core.guard import forked_rng
from robustdist.data import DigitsDataModule, FashionMNISTDataModule, ImageDataModule, MNIST5kDataModule
from robustdist.errors import RobustDistWarning
from robustdist.evaluation import RobustTally
from robustdist.objectives import (
    AWP,
    DAT,
    FGSMRS,
    MART,
    NFGSM,
    PGDAT,
    TRADES,
    FastBAT,
    FreeAT,
    FriendlyAT,
    GradAlign,
    Objective,
)

__all__ = [
    "BATCH_SIZE",
    "METHODS",
    "SETTINGS",
    "Method",
    "Setting",
    "SmallClassifier",
    "describe",
    "judge",
    "pgd20",
    "quiet",
    "run",
]

BATCH_SIZE = 100
_NUM_CHECKS = 15
OptimizerName = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Setting:
    """A data set, its radius, the steps of multi-step attacks in training, and how it is trained on."""

    data: type[ImageDataModule]
    eps: float
    steps: int
    epochs: int
    lr: float = 5e-3
    ramp: float = 0.3


SETTINGS = {
    "mnist5k": Setting(MNIST5kDataModule, eps=0.3, steps=7, epochs=15),
    "fashion_mnist": Setting(FashionMNISTDataModule, eps=0.1, steps=5, epochs=1),
    "digits": Setting(DigitsDataModule, eps=0.1, steps=5, epochs=10),
}


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        steps, step_share: Steps of its attack and their size over the radius, if not the usual ones.
        passes: Epochs of the Trainer that make one pass over the data.
    """

    name: str
    make: Callable[[], Objective] | None
    steps: int | None = None
    step_share: float | None = None
    passes: int = 1

    def attack(self, setting: Setting, seed: int) -> Attack:
        """Return the attack that the objective is given."""
        step_size = None if self.step_share is None else self.step_share * setting.eps
        return PGD(eps=setting.eps, steps=self.steps or setting.steps, step_size=step_size, seed=seed)


METHODS = {
    "standard": Method("ordinary training", None),
    "fgsm_rs": Method("FGSM-RS", FGSMRS),
    "n_fgsm": Method("N-FGSM", NFGSM),
    "n_fgsm_free": Method("N-FGSM, noise not clipped", lambda: NFGSM(clip_noise=False)),
    "grad_align": Method("GradAlign", GradAlign),
    "pgd2": Method("PGD-2, step eps/2", PGDAT, steps=2, step_share=0.5),
    "pgd_at": Method("PGD-AT", PGDAT),
    "trades": Method("TRADES", TRADES),
    "mart": Method("MART", MART),
    "awp": Method("AWP on PGD-AT", AWP),
    "dat": Method("DAT", DAT),
    "free_at": Method("FreeAT, 4 replays", FreeAT, passes=4),
    # tau of the paper: 0, 1 and 2 up to epoch 50, 90 and 120
    "friendly_at": Method("FriendlyAT", lambda: FriendlyAT(tau=[(0.0, 0), (50 / 120, 1), (90 / 120, 2)])),
    "fast_bat": Method("Fast-BAT, relative step", FastBAT),
    "fast_bat_paper": Method("Fast-BAT, constant of the paper", lambda: FastBAT(step="paper")),
}


class SmallClassifier(LightningModule):
    """Cross-entropy with Adam, or SGD with momentum 0.9, and a one-cycle rate."""

    def __init__(self, net: nn.Module, lr: float, optimizer: OptimizerName = "adam") -> None:
        super().__init__()
        self.net = net
        self.lr = lr
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of one batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimiser with a one-cycle rate."""
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@contextmanager
def quiet(threads: int, seed: int) -> Iterator[None]:
    """Run with ``threads`` threads and seeded random streams, without Lightning's messages and our own warnings."""
    logger = logging.getLogger(PACKAGE)
    level, threads_before = logger.level, torch.get_num_threads()
    try:
        logger.setLevel(logging.ERROR)
        torch.set_num_threads(threads)
        with warnings.catch_warnings(), forked_rng(torch.device("cpu"), seed):
            # what the guard warns about is in the table
            warnings.simplefilter("ignore", RobustDistWarning)
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        torch.set_num_threads(threads_before)
        logger.setLevel(level)


def describe(method: Method, setting: Setting) -> str:
    """Return all that makes up the training of a row, so that a figure of another one is not taken for it."""
    return "ordinary" if method.make is None else f"{method.make()!r}, {method.attack(setting, 0)!r}"


def run(method: Method, setting: Setting, data: ImageDataModule, seed: int, num_test: int) -> dict[str, Any]:
    """Train the net and return accuracies on test images, seconds of processor time and what the guard saw.

    The caller seeds the global random streams; ``seed`` is that of the attack.
    """
    module = SmallClassifier(small_conv_net(data.input_shape[-1], data.num_classes), setting.lr)
    callbacks: list[Callback] = []
    guard: CatastrophicOverfittingGuard | None = None
    if method.make is not None:
        num_steps = method.passes * setting.epochs * len(data.train_dataloader())
        guard = CatastrophicOverfittingGuard(every_n_steps=max(1, num_steps // _NUM_CHECKS))
        ramp = LinearRamp(setting.ramp) if setting.ramp else None
        callbacks = [AdversarialTraining(method.make(), method.attack(setting, seed), eps_schedule=ramp), guard]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=method.passes * setting.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()
    trainer.fit(module, train_dataloaders=data.train_dataloader())
    seconds = time.process_time() - start
    attacks = {
        "pgd20": pgd20(setting),
        "margin": PGD(eps=setting.eps, steps=50, step_size=setting.eps / 8, restarts=2, attack_loss="margin"),
    }
    return {**judge(module, attacks, data, num_test), "cpu_seconds": seconds, "guard": _report(guard)}


def pgd20(setting: Setting) -> Attack:
    """Return the attack that judges: 20 steps of an eighth of the radius."""
    return PGD(eps=setting.eps, steps=20, step_size=setting.eps / 8)


def judge(module: nn.Module, attacks: Mapping[str, Attack], data: ImageDataModule, num_test: int) -> dict[str, Any]:
    """Return the accuracies of a module on the first test images, per attack and under the worst of them."""
    x, y = (part[:num_test] for part in data.parts.test.tensors)
    tally = RobustTally(attacks)
    module.eval()
    for first in range(0, len(x), BATCH_SIZE):
        part = slice(first, first + BATCH_SIZE)
        tally.update(module, module, x[part], y[part], range(first, first + len(x[part])))
    found = tally.result()
    return {
        "clean_acc": found.clean_acc,
        **{f"{name}_acc": found.attack_acc(name) for name in attacks},
        "robust_acc": found.robust_acc,
    }


def _report(guard: CatastrophicOverfittingGuard | None) -> dict[str, Any] | None:
    if guard is None:
        return None
    collapses = [entry["epoch"] for entry in guard.history if entry["collapsed"]]
    return {"collapsed_in_epoch": collapses[0] if collapses else None, "history": guard.history}
