"""Whether values are finite: asked at once, or answered for a whole step together."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Verdicts", "is_finite"]


class Verdicts:
    """Finds values that are not finite.

    The host has to wait for a device that it asks, and the device for the network before it can answer. So the
    questions of a step may be kept on the device, to be asked in one go once nothing else is left to do.

    Args:
        later: Whether answers wait for :meth:`settle`.
    """

    def __init__(self, *, later: bool = False) -> None:
        self.later = later
        self._flags: list[Tensor] = []
        self._actions: list[Callable[[], object]] = []

    def bad(self, x: Tensor, then: Callable[[], object]) -> bool:
        """Call ``then`` if an entry is not finite, now or in :meth:`settle`; return whether it was called."""
        if self.later:
            self._flags.append(torch.isfinite(x).all().logical_not_())
            self._actions.append(then)
            return False
        if is_finite(x):
            return False
        then()
        return True

    def settle(self) -> None:
        """Answer what was asked since the last call."""
        if not self._flags:
            return
        flags, actions = torch.stack(self._flags).tolist(), self._actions
        self._flags, self._actions = [], []
        for flag, action in zip(flags, actions, strict=True):
            if flag:
                action()


def is_finite(x: Tensor) -> bool:
    """Whether all entries are finite, without a temporary of the size of ``x`` in the usual case."""
    # a finite sum cannot have a non-finite term; an infinite one may be an overflow
    return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())
