"""A bit controller in training: what it sees of every step, and the codec it asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from torch import Tensor

from robustdist.comm import QSGD, Compressor
from robustdist.comm.controller import BitController
from robustdist.comm.engine import CommEngine
from robustdist.errors import UsageError

__all__ = ["BitControl"]


class BitControl:
    """Feeds a controller with the mean loss and times of all ranks, and changes the codec as it decides.

    The numbers travel with the gradients of the step (times are those of the step before), so all ranks see the same
    bits and decide alike without another message.

    Args:
        controller: Decides.
        compressor: A :class:`~robustdist.comm.QSGD`, whose other settings are kept.

    Raises:
        UsageError: If the codec has no bits to choose.
    """

    def __init__(self, controller: BitController, compressor: Compressor) -> None:
        if not isinstance(compressor, QSGD):
            raise UsageError(
                f"bits={controller!r} needs compressor=QSGD(...), whose bits it chooses, not {compressor!r}"
            )
        self.controller = controller
        self._settings = compressor.settings()
        self._loss: Tensor | None = None
        self._begin: float | None = None
        # of the step before; unknown in the first one, which a controller of times leaves out
        self._seconds = (math.nan, math.nan)

    def codec(self) -> Compressor:
        """Return the codec with the present bits."""
        return QSGD(**{**self._settings, "bits": self.controller.bits})

    def begin_step(self) -> None:
        """Start the clock with the first batch of a step."""
        if self._begin is None:
            self._begin = perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """See the loss of a batch, divided by the number of batches of the step."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def note(self) -> tuple[float, float, float]:
        """Return what the gradients of this step carry: loss, compute and communication seconds."""
        return (0.0 if self._loss is None else float(self._loss), *self._seconds)

    def end_step(self, engine: CommEngine, wait_seconds: float, *, executed: bool) -> None:
        """Let the controller see the step, and change the codec for the next one."""
        if self._loss is None or not engine.note:
            return  # no gradients were averaged since the last step
        loss, compute, comm = engine.note
        if self._begin is not None:
            self._seconds = (max(perf_counter() - self._begin - wait_seconds, 0.0), wait_seconds)
        self._begin = self._loss = None
        if executed:
            before = self.controller.bits
            if self.controller.observe(loss, compute_seconds=compute, comm_seconds=comm) != before:
                engine.change(self.codec())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller, equal on all ranks."""
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.controller.load_state_dict(state)
