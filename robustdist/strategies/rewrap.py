"""A new DDP wrapper in the middle of fit, for when parameters have been frozen, replaced or removed."""

from __future__ import annotations

import gc

from robustdist._lightning import DDPStrategy, Trainer

__all__ = ["rewrap"]


def rewrap(trainer: Trainer) -> None:
    """Wrap the module anew: DDP waits for the gradients of those parameters that needed one when it was made.

    For all processes together, between two optimiser steps. Without DDP, or before it has wrapped, there is nothing
    to do.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or strategy.model is strategy.lightning_module:
        return
    strategy.model = strategy.lightning_module
    # the old wrapper is in cycles; its hooks on the parameters go with it
    gc.collect()
    strategy.configure_ddp()
