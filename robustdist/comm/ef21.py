"""Compressing differences to an estimate that sender and receivers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robustdist.comm.base import Compressor, Payload, RememberingCompressor
from robustdist.comm.error_feedback import Memory
from robustdist.comm.sparsify import TopK
from robustdist.comm.verdicts import is_finite
from robustdist.errors import UsageError

__all__ = ["EF21", "EF21Memory"]


class EF21Memory(Memory):
    r"""An estimate of each gradient, the same at the sender and at all receivers.

    .. math:: c_i = C(g_i - h_i), \qquad h_i \leftarrow h_i + c_i, \qquad h \leftarrow h + \mathrm{mean}_i\, c_i

    The optimiser gets h, the mean of the :math:`h_i`. A message that is missed leaves it wrong for ever: a step that
    is not finite on any rank is undone on all.
    """

    slots = ("estimate", "aggregate")

    def prepare(self, name: str, grad: Tensor, *, scale: float = 1.0) -> Tensor:
        """Subtract the estimate."""
        estimate = self._matching(name, "estimate", grad)
        return grad if estimate is None else grad.sub_(estimate, alpha=scale)

    def update(self, name: str, value: Tensor, sent: Tensor, *, scale: float = 1.0) -> None:
        """Move the estimate by what was sent."""
        self._move(name, "estimate", sent, scale)

    def finish(self, name: str, mean: Tensor, *, scale: float = 1.0) -> Tensor:
        """Move the aggregate by the mean difference and return it in ``mean``."""
        if not is_finite(mean):
            self.undo(name)
            return mean
        self._move(name, "aggregate", mean, scale)
        return torch.mul(self._changed[name]["aggregate"], scale, out=mean)

    def _move(self, name: str, slot: str, by: Tensor, scale: float) -> None:
        if not is_finite(by):
            return
        kept = self._matching(name, slot, by)
        self._put(name, slot, torch.zeros_like(by) if kept is None else kept)
        self._changed[name][slot].add_(by, alpha=1 / scale)


class EF21(RememberingCompressor):
    r"""Sends the compressed difference between a tensor and the estimate of it that the receiver has.

    :meth:`compress` moves the sender's estimate, :meth:`decompress` the receiver's, which it returns: use one object
    for both and one ``name`` per tensor, and decompress every payload once, in order. Estimates start at 0. With
    stochastic gradients the plain form that this is converges to a neighbourhood only.

    Args:
        base: The codec for the differences, ``TopK()`` by default; used in its contractive form.

    Raises:
        UsageError: If ``base`` has a memory of its own.

    References:
        Richtarik et al., "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback".

    Example:
        >>> codec, x = EF21(TopK(ratio=0.5)), torch.tensor([4.0, 3.0])
        >>> [codec.decompress(codec.compress(x)).tolist() for _ in range(2)]
        [[4.0, 0.0], [4.0, 3.0]]
    """

    def __init__(self, base: Compressor | None = None) -> None:
        base = TopK() if base is None else base
        if base.has_memory:
            raise UsageError(f"base={base!r} has a memory of its own: use a codec without one, such as TopK")
        self.base = base.contractive()
        self.block = self.base.block
        self._received: dict[str, Tensor] = {}
        super().__init__(seed=base.seed)

    def make_memory(self, dtype: torch.dtype = torch.float32) -> EF21Memory:
        """Return the estimates."""
        return EF21Memory(dtype=dtype)

    def delta(self, numel: int) -> float | None:
        """Return the constant of the codec for the differences."""
        return self.base.delta(numel)

    def payload_bytes(self, numel: int | Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return what the codec for the differences, which are float32, sends."""
        return self.base.payload_bytes(numel)

    def encode(self, x: Tensor, out: Tensor, *, rank: int = 0, step: int = 0, name: str = "") -> None:
        """Encode a difference."""
        self.base.encode(x, out, rank=rank, step=step, name=name)

    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Decode a difference."""
        self.base.decode(data, out, alpha=alpha)

    @torch.no_grad()
    def decompress(self, payload: Payload, *, name: str = "") -> Tensor:
        """Return the receiver's estimate after this payload."""
        difference = super().decompress(Payload(payload.data, payload.shape), name=name)
        estimate = self._received.get(name)
        if estimate is not None:
            difference.add_(estimate.view(difference.shape))
        if is_finite(difference):
            self._received[name] = difference.clone()
        return difference.to(payload.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with both sides' estimates and that of the codec for the differences."""
        received = {name: estimate.clone() for name, estimate in self._received.items()}
        return {**super().state_dict(), "received": received, "base": self.base.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._received = {name: estimate.clone() for name, estimate in state["received"].items()}
        self.base.load_state_dict(state["base"])
