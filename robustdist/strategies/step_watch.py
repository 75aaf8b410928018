"""Which optimiser steps were executed: a gradient scaler skips some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["StepWatch"]


class StepWatch:
    """Learns of executed steps from post hooks, which run only when an optimiser really stepped.

    Args:
        on_executed: Called with the optimiser after each executed step.

    Attributes:
        executed: Whether a step was executed since this was last set to False.
    """

    def __init__(self, on_executed: Callable[[Optimizer], None]) -> None:
        self.executed = False
        self._on_executed = on_executed
        self._hooks: dict[int, RemovableHandle] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Watch an optimiser, if it is not watched yet; wrappers put theirs in the place of the first ones."""
        if id(optimizer) not in self._hooks:
            self._hooks[id(optimizer)] = optimizer.register_step_post_hook(self._note)

    def close(self) -> None:
        """Stop to watch."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _note(self, optimizer: Any, *_: Any) -> None:
        # fused optimisers are called in any case and skip the update themselves
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self.executed = True
            self._on_executed(optimizer)
