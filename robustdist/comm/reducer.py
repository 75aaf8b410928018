"""Means of tensors that are no gradients, such as momenta, through a codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.engine import CommEngine
from robustdist.comm.sign import Sign
from robustdist.errors import UsageError

__all__ = ["MomentumReducer"]


class MomentumReducer:
    """Averages named tensors over the ranks in place, in one bit per entry with error feedback.

    It is what :class:`robustdist.optim.OneBitAdam` takes as ``reduce``. It has a
    :class:`~robustdist.comm.engine.CommEngine` of its own, so all ranks must make it, and call it with tensors of the
    same names and shapes. Those of fewer than ``small`` elements travel uncompressed. The residuals, of this rank as a
    sender and as the owner of chunks, change with every call unless what was sent is not finite.

    Args:
        codec: By default ``Sign()``.
        **options: Arguments of the engine.

    Attributes:
        engine: The engine.
        calls: Number of averages so far, which the draws of a codec depend on.

    Example:
        Ready for several processes::

            optimizer = OneBitAdam(model.named_parameters(), freeze_step=1000)
            optimizer.reduce = MomentumReducer()
    """

    def __init__(self, codec: Compressor | None = None, **options: Any) -> None:
        self.engine = CommEngine(Sign() if codec is None else codec, **options)
        self.calls = 0
        self._buffer = torch.empty(0)

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the tensors by their means over the ranks.

        Args:
            tensors: By name, any shapes and floating-point types, on one device.

        Raises:
            RankError: If a rank failed, on all of them.
        """
        sizes = {name: self._padded(tensor.numel()) for name, tensor in tensors.items()}
        total, device = sum(sizes.values()), next(iter(tensors.values())).device
        if self._buffer.numel() != total or self._buffer.device != device:
            self._buffer = torch.empty(total, device=device)
        parts, begin = dict[str, Tensor](), 0
        for name, tensor in tensors.items():
            parts[name] = self._buffer[begin : begin + sizes[name]]
            parts[name][: tensor.numel()].view(tensor.shape).copy_(tensor)
            if sizes[name] > tensor.numel():
                last = parts[name][-self.engine.codec.block :]
                known = tensor.numel() % len(last)
                last[known:] = last[:known].abs().mean()
            begin += sizes[name]
        self.engine.submit(parts, self._buffer, step=self.calls).wait()
        self.engine.commit()
        self.calls += 1
        for name, tensor in tensors.items():
            tensor.copy_(parts[name][: tensor.numel()].view(tensor.shape))

    def padded(self, tensor: Tensor) -> Tensor:
        """Return a residual of a tensor as the engine keeps it: flat, with zeros up to the length that is sent."""
        flat = tensor.flatten()
        return torch.nn.functional.pad(flat, (0, self._padded(len(flat)) - len(flat)))

    def _padded(self, numel: int) -> int:
        """Round up to whole blocks where the scale is a mean over all of the block, so as not to count zeros there."""
        whole = isinstance(self.engine.codec, Sign) and numel >= self.engine.small
        return -(-numel // self.engine.codec.block) * self.engine.codec.block if whole else numel

    def close(self) -> None:
        """End the thread of the engine."""
        self.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank, which are others on every rank, and the number of calls."""
        memory, owned = self.engine.memory, self.engine.owned
        return {
            "rank": self.engine.rank,
            "world_size": self.engine.world_size,
            "calls": self.calls,
            "sender": {} if memory is None else memory.state_dict(),
            "owner": {} if owned is None else owned.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on the same rank of as many ranks.

        Raises:
            UsageError: If it comes from another rank or number of ranks.
        """
        here, saved = (self.engine.rank, self.engine.world_size), (state["rank"], state["world_size"])
        if here != saved:
            raise UsageError(
                f"reduce: the residuals are those of rank {saved[0]} of {saved[1]} and this is rank {here[0]} of "
                f"{here[1]}: give every rank its own, or start without them"
            )
        self.calls = int(state["calls"])
        if self.engine.memory is not None:
            self.engine.memory.load_state_dict(state["sender"])
        if self.engine.owned is not None:
            self.engine.owned.load_state_dict(state["owner"])
