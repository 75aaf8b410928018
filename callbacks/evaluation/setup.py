"""What a robust evaluation checks before it starts: its arguments, the Trainer, the callbacks beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustdist._lightning import Callback, LightningModule, Trainer, check_same_package, rank_zero_warn
from robustdist.attacks.base import Attack
from robustdist.core.redirect import check_module_can_be_called
from robustdist.errors import RobustDistWarning, UsageError

__all__ = [
    "attack_context",
    "check_attacks",
    "check_combination",
    "check_report_dir",
    "warn_about_averages",
    "warn_about_patience",
]


def check_attacks(attacks: Any) -> None:
    """Refuse attacks that an evaluation cannot use or log.

    Raises:
        UsageError: If ``attacks`` is not a mapping of loggable names to untargeted attacks.
    """
    if attacks is not None and (not isinstance(attacks, Mapping) or not attacks):
        raise UsageError("attacks must map names to attacks, for example {'pgd20': PGD(steps=20)}")
    for name, attack in (attacks or {}).items():
        if not isinstance(attack, Attack):
            raise UsageError(f"attacks[{name!r}]={attack!r} is not an attack of robustdist.attacks: create one")
        if name == "clean" or "/" in name:
            raise UsageError(
                f"attacks[{name!r}] would be logged as another key: choose a name without slashes, not clean"
            )
        if attack.targeted:
            raise UsageError(
                f"attacks[{name!r}] is targeted, but an evaluation knows only true labels: use an untargeted attack"
            )


def check_report_dir(report_dir: str | None, **needed_by: bool) -> None:
    """Refuse a folder that is a file, and options that need a folder without one.

    Raises:
        UsageError: If ``report_dir`` cannot be used, or an option in ``needed_by`` is on without it.
    """
    if report_dir is not None and Path(report_dir).is_file():
        raise UsageError(f"report_dir={report_dir!r} is a file: choose a folder")
    for option, on in needed_by.items():
        if on and report_dir is None:
            raise UsageError(f"{option}=True needs a folder to write to: give report_dir")


def check_combination(trainer: Trainer, pl_module: LightningModule, prefix: str, kind: type[Callback]) -> None:
    """Refuse a Trainer or module that an evaluation of class ``kind`` cannot work with.

    Raises:
        UsageError: If the module cannot be called alone, fetches its own batches, or two evaluations share a prefix.
    """
    check_same_package(pl_module)
    check_module_can_be_called(trainer.strategy, option="RobustEvaluation")
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if sum(isinstance(callback, kind) and getattr(callback, "prefix", None) == prefix for callback in callbacks) > 1:
        raise UsageError(
            f"two RobustEvaluation callbacks log as {prefix}/acc, and Lightning would average them: "
            "give one of them another prefix, or put all attacks into one"
        )
    for step in (pl_module.validation_step, pl_module.test_step):
        if "dataloader_iter" in inspect.signature(step).parameters:
            raise UsageError(
                f"RobustEvaluation needs the batch, but {step.__name__}(dataloader_iter) fetches its own: "
                f"write {step.__name__}(self, batch, batch_idx)"
            )


def warn_about_patience(trainer: Trainer, prefix: str, every_n_epochs: int) -> None:
    """Say so if an early stopping has less patience than an evaluation has epochs."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        patience = getattr(callback, "patience", None)
        monitored = str(getattr(callback, "monitor", None)).startswith(f"{prefix}/")
        if monitored and patience is not None and patience < every_n_epochs:
            rank_zero_warn(
                f"{type(callback).__name__} stops after {patience} epochs without a better {callback.monitor}, but "
                f"every_n_epochs={every_n_epochs} is less often: raise patience or lower every_n_epochs",
                category=RobustDistWarning,
            )


def warn_about_averages(pl_module: LightningModule, averages: Mapping[str, Tensor] | None) -> None:
    """Say so if the weights under test are not the averages that the loaded checkpoint holds.

    A ``WeightAveraging`` that has trained in the same Trainer loads the weights behind the averages and swaps the two
    for validation, but not for ``test``.
    """
    present = pl_module.state_dict()
    if averages is not None and any(not torch.equal(present[name].cpu(), averages[name].cpu()) for name in averages):
        rank_zero_warn(
            "test runs on the weights before averaging, because the WeightAveraging of the training is still in this "
            "Trainer: test with a new Trainer to judge the averages that the checkpoint was chosen for",
            category=RobustDistWarning,
        )


@contextmanager
def attack_context(trainer: Trainer, device: torch.device) -> Iterator[None]:
    """Run forward passes as the precision plugin does, with the default dtype of "true" precisions, but no autocast."""
    with trainer.precision_plugin.val_step_context(), torch.autocast(device.type, enabled=False):
        yield
