"""Batch norms of a module in training, and of averages of it, after a removal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from robustdist._lightning import LightningModule, Trainer
from robustdist.callbacks.pruning.surgery import averages_of
from robustdist.core.compiled import compiled_part, uncompiled
from robustdist.core.redirect import StepInterceptor
from robustdist.pruning.averaged_norms import AveragedNorms
from robustdist.pruning.batch_norm import BatchNormRecalibration

__all__ = ["Recalibration"]

#: Outermost of all transforms of the step: what is called in any of them is seen.
_ORDER = -1000


class Recalibration:
    """Statistics of batch norms averaged anew over ``num_batches`` of training, for averaged copies by calls of theirs.

    On several ranks the copies end with the statistics of rank 0, as the module does under DDP.
    """

    def __init__(self, num_batches: int) -> None:
        self._own = BatchNormRecalibration(num_batches)
        self._copies: list[AveragedNorms] = []
        self._strategy: Any = None

    def start(self) -> None:
        """Begin with the next batch."""
        self._own.start()

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Go on after a checkpoint was loaded."""
        self._own.attach(module)
        if self._own.names:
            self._follow(trainer, module, fresh=False)

    def before_batch(self, trainer: Trainer, module: LightningModule) -> None:
        """Drop the statistics before the first batch; after the last, let averages go on as before."""
        if self._own.before_batch(module):
            self._follow(trainer, module, fresh=True)
        elif not self._own.names:
            self._leave()

    def count(self, trainer: Trainer, module: LightningModule) -> None:
        """Note that a batch has passed."""
        self._own.count(module)
        for copy in self._copies:
            copy.settle()
            if not self._own.names:  # the last; averages are updated after this batch too, so it is no end yet
                copy.take(trainer.strategy.broadcast(copy.statistics()))

    def detach(self, module: LightningModule) -> None:
        """End with the training."""
        self._leave()
        self._own.detach(module)

    def state_dict(self) -> dict[str, Any]:
        """Return what is left to do."""
        return self._own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was left to do."""
        self._own.load_state_dict(state)

    def _follow(self, trainer: Trainer, module: LightningModule, *, fresh: bool) -> None:
        averages = [average for average in averages_of(trainer) if average.use_buffers]
        self._copies = [AveragedNorms(module, average, self._own.names, fresh=fresh) for average in averages]
        if self._copies or compiled_part(module) is not None:
            self._strategy = trainer.strategy
            StepInterceptor.of(self._strategy).add(self._training_step, _ORDER)

    def _leave(self) -> None:
        if self._strategy is not None:
            StepInterceptor.of(self._strategy).remove(self._training_step)
            self._strategy = None
        while self._copies:
            self._copies.pop().close()

    def _training_step(self, next_step: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as here:
            if self._own.names:
                # a plain average depends on the number of batches, so that compiled code would break or grow with it
                here.enter_context(uncompiled())
                for copy in self._copies:
                    here.enter_context(copy.watching())
            return next_step(batch, *args, **kwargs)
