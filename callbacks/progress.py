"""How far training is."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

from robustdist._lightning import LightningModule, Trainer
from robustdist.errors import UsageError

__all__ = ["Progress"]


class Progress:
    """Counts executed optimiser steps; in manual optimisation, where a batch may step at will, it counts batches.

    A step that a gradient scaler skipped does not count: a post hook of the optimiser runs only when it really stepped,
    while the Trainer's ``global_step`` counts skipped ones too.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        #: The Trainer's own count when this one began, None before that.
        self.started_at: int | None = None
        # None while the length of training is unknown, as in a learning rate finder: schedules are at their end then
        self._num_total_steps: float | None = None
        self._counter: RemovableHandle | None = None

    @property
    def value(self) -> float:
        """Progress in (0, 1], that of the step being made."""
        if self._num_total_steps is None:
            return 1.0
        # counted from 1: a ramp that starts at zero shall not waste the first step on a radius of zero
        return min(1.0, (self.num_steps + 1) / self._num_total_steps)

    @property
    def total(self) -> float | None:
        """Steps of the whole training, None while that is unknown."""
        return self._num_total_steps

    @property
    def done(self) -> float:
        """Share of the training that lies behind, in [0, 1]."""
        return 1.0 if self._num_total_steps is None else min(1.0, self.num_steps / self._num_total_steps)

    def reset(self) -> None:
        """Begin a new training."""
        self.num_steps, self.started_at = 0, None

    def state_dict(self) -> dict[str, int | None]:
        """Return what a resumed training needs."""
        return {"num_steps": self.num_steps, "started_at": self.started_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; a checkpoint may lack ``started_at``."""
        self.num_steps, self.started_at = int(state["num_steps"]), state.get("started_at")

    def forget_length(self) -> None:
        """Let ``value`` be 1 until the length of training is known."""
        self._num_total_steps = None

    def start(self, trainer: Trainer, module: LightningModule, followed_by: str | None) -> None:
        """Start to count.

        Args:
            trainer: The Trainer whose optimisers exist by now.
            module: The module in training.
            followed_by: The option that needs the length of training, or None.

        Raises:
            UsageError: If the length is needed and unknown.
        """
        if self.started_at is None:
            # also from a checkpoint without this entry: right unless steps had been skipped by then
            self.started_at = self._done(trainer, module) - self.num_steps
        if followed_by is not None:
            self._num_total_steps = self._length(trainer, module, followed_by)
        if trainer.optimizers and module.automatic_optimization:
            self._counter = trainer.optimizers[0].register_step_post_hook(self._count)

    def end_batch(self, module: LightningModule) -> None:
        """Count a batch, in manual optimisation."""
        if not module.automatic_optimization:
            self.num_steps += 1

    def stop(self) -> None:
        """Stop to count."""
        if self._counter is not None:
            self._counter.remove()
            self._counter = None

    def _length(self, trainer: Trainer, module: LightningModule, followed_by: str) -> float:
        """Return what will have been counted at the end of training if no step is skipped.

        Steps that were skipped before a training was resumed do not shorten it: with them or without a break, a
        schedule is where it would be.
        """
        assert self.started_at is not None
        if module.automatic_optimization:
            total = trainer.estimated_stepping_batches
        else:
            epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
            total = trainer.num_training_batches * epochs
        # -1 is Lightning's answer for max_epochs with a loader that has no length
        if not 0 < total < float("inf"):
            raise UsageError(
                f"{followed_by} needs the length of training: set the Trainer's max_epochs with a loader that has a "
                "length, or in automatic optimisation its max_steps"
            )
        return max(1.0, total - self.started_at)

    @staticmethod
    def _done(trainer: Trainer, module: LightningModule) -> int:
        """Return how many steps the Trainer has counted, skipped ones too, or batches in manual optimisation."""
        return trainer.global_step if module.automatic_optimization else trainer.fit_loop.total_batch_idx + 1

    def _count(self, optimizer: Any, *_: Any) -> None:
        # fused optimisers are called in any case and skip the update themselves
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self.num_steps += 1
