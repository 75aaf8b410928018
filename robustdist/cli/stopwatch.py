"""Seconds of training alone."""

from __future__ import annotations

import time
from typing import Any

import torch

from robustdist._lightning import Callback, LightningModule, Trainer

__all__ = ["Stopwatch"]


class Stopwatch(Callback):
    """Measures training from its first to its last step, without validation and the start of processes.

    The result is put among the trainer's metrics, which come back from the workers of every launcher.
    """

    KEY = "train_seconds"

    def __init__(self) -> None:
        self._started = 0.0
        self._paused = 0.0
        self._validation_started = 0.0

    @classmethod
    def read(cls, trainer: Trainer) -> float:
        """Return the seconds of the fit that ended last."""
        return float(trainer.callback_metrics.get(cls.KEY, float("nan")))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self._started, self._paused = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause."""
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on."""
        self._paused += time.perf_counter() - self._validation_started

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        seconds: Any = torch.tensor(time.perf_counter() - self._started - self._paused)
        trainer.callback_metrics[self.KEY] = seconds
