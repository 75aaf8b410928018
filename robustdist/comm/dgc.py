"""Deep gradient compression."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from robustdist.comm.base import RememberingCompressor
from robustdist.comm.error_feedback import Memory
from robustdist.comm.sparsify import TopK
from robustdist.comm.verdicts import is_finite
from robustdist.errors import UsageError
from robustdist.types import Number, parse_number

__all__ = ["DGC", "DGCMemory"]


class DGCMemory(Memory):
    r"""Momentum before the selection, and both vectors cleared where an entry was sent.

    .. math::
        m \leftarrow \mu m + g, \qquad v \leftarrow v + m, \qquad \text{send } C(v), \qquad
        m, v \leftarrow 0 \text{ where } C(v) \neq 0

    With ``nesterov``: :math:`m \leftarrow \mu (m + g)`, :math:`v \leftarrow v + m + g`.

    Args:
        momentum: Factor :math:`\mu` in [0, 1).
        nesterov: Use Nesterov's form.
        dtype: Type in which the vectors are stored.
    """

    slots = ("velocity", "momentum")

    def __init__(self, momentum: float = 0.9, *, nesterov: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype=dtype)
        self.momentum = momentum
        self.nesterov = nesterov
        self._bad: set[str] = set()

    def prepare(self, name: str, grad: Tensor, *, scale: float = 1.0) -> Tensor:
        """Accumulate; a non-finite gradient is passed on and leaves both vectors alone."""
        self._bad.discard(name)
        if not is_finite(grad):
            self._bad.add(name)
            return grad
        if scale != 1.0:
            grad.div_(scale)
        vectors = {}
        for slot in self.slots:
            kept = self._matching(name, slot, grad)
            self._put(name, slot, torch.zeros_like(grad) if kept is None else kept)
            vectors[slot] = self._changed[name][slot]
        if self.nesterov:
            vectors["velocity"].add_(vectors["momentum"].add_(grad).mul_(self.momentum)).add_(grad)
        else:
            vectors["velocity"].add_(vectors["momentum"].mul_(self.momentum).add_(grad))
        return torch.mul(vectors["velocity"], scale, out=grad)

    def update(self, name: str, value: Tensor, sent: Tensor, *, scale: float = 1.0) -> None:
        """Clear what was sent."""
        if name in self._bad:
            return
        if not is_finite(sent):
            self.undo(name)
            return
        unsent = sent == 0
        for slot in self.slots:
            self._changed[name][slot].mul_(unsent)

    def dense(self, name: str, mean: Tensor, *, scale: float = 1.0) -> Tensor:
        """Apply the momentum to a mean that is sent whole: nothing is left over, so nothing is cleared."""
        if not is_finite(mean):
            return mean
        kept = self._matching(name, "momentum", mean)
        self._put(name, "momentum", torch.zeros_like(mean) if kept is None else kept)
        momentum, grad = self._changed[name]["momentum"], mean / scale
        if self.nesterov:
            return mean.add_(momentum.add_(grad).mul_(self.momentum), alpha=scale)
        return torch.mul(momentum.mul_(self.momentum).add_(grad), scale, out=mean)


class DGC(TopK, RememberingCompressor):
    r"""Top-k of an accumulated, momentum-corrected gradient; see :class:`DGCMemory`.

    The momentum is here: run the optimiser with momentum 0. The selection is that of :class:`TopK`, over the whole
    tensor. The paper's warm-up of the ratio and clipping of the local gradient belong to whoever drives the codec.

    Args:
        ratio: Share of entries to send, in (0, 1].
        momentum: Factor in [0, 1).
        nesterov: Use Nesterov's form.
        values: As in :class:`TopK`.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training".
    """

    def __init__(
        self,
        ratio: Number = 0.001,
        *,
        momentum: Number = 0.9,
        nesterov: bool = False,
        values: Literal["fp32", "fp16"] = "fp32",
    ) -> None:
        self.momentum = parse_number(momentum, "momentum")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={momentum!r} must be at least 0 and below 1")
        self.nesterov = nesterov
        super().__init__(ratio, values=values)

    def make_memory(self, dtype: torch.dtype = torch.float32) -> DGCMemory:
        """Return the two accumulators."""
        return DGCMemory(self.momentum, nesterov=self.nesterov, dtype=dtype)
