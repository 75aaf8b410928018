"""Statistics of batch norms after a removal."""

from __future__ import annotations

from typing import Any

from torch import nn

from robustdist.pruning.layers import CHANNEL_NORMS

__all__ = ["BatchNormRecalibration"]


class BatchNormRecalibration:
    """For some training batches, batch norms keep the plain average of what they see, from nothing.

    A moving average remembers the network before the removal for tens of steps, which ruins an evaluation in between.
    No pass over data is made: the batches are those of the training, attacked ones included.

    Args:
        num_batches: How many; 0 leaves the norms as they are.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self._due = False
        self._left = 0
        self._momenta: dict[str, float | None] = {}
        self._attached = False

    def start(self) -> None:
        """Begin with the next batch; until it is there, old statistics are better than none."""
        self._due = self.num_batches > 0

    @property
    def names(self) -> list[str]:
        """Paths of the norms that are being averaged anew; empty before and after."""
        return list(self._momenta)

    def before_batch(self, module: nn.Module) -> bool:
        """Drop the statistics, if the first batch after the removal is about to pass; return whether any were."""
        if not self._due:
            return False
        self._due = False
        for name, layer in _norms(module):
            if not layer.training:
                continue  # frozen: it keeps its statistics
            self._momenta[name] = layer.momentum
            layer.reset_running_stats()
            layer.momentum = None  # torch's way to ask for the plain average
        self._left = self.num_batches if self._momenta else 0
        self._attached = True
        return bool(self._momenta)

    def count(self, module: nn.Module) -> None:
        """Note that a batch has passed."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._restore(module)
                self._momenta = {}

    def attach(self, module: nn.Module) -> None:
        """Go on after a checkpoint was loaded."""
        self._attached = True
        if self._left:
            for name, layer in _norms(module):
                if name in self._momenta:
                    layer.momentum = None

    def detach(self, module: nn.Module) -> None:
        """Give the norms their own momentum back, at the end of a training that was shorter.

        What is left to do stays in :meth:`state_dict`: a checkpoint may be written after the end.
        """
        if self._attached:
            self._restore(module)
        self._attached = False

    def state_dict(self) -> dict[str, Any]:
        """Return what is left to do."""
        return {"due": self._due, "left": self._left, "momenta": dict(self._momenta)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was left to do; :meth:`attach` carries it on."""
        self._due, self._left, self._momenta = bool(state["due"]), int(state["left"]), dict(state["momenta"])

    def _restore(self, module: nn.Module) -> None:
        for name, layer in _norms(module):
            if name in self._momenta:
                layer.momentum = self._momenta[name]


def _norms(module: nn.Module) -> list[tuple[str, Any]]:
    """Norms that have statistics."""
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, CHANNEL_NORMS) and layer.track_running_stats
    ]
