"""The gradients of a bucket as both ends of its exchanges, with what is remembered of them between two steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.ends import Ends
from robustdist.comm.error_feedback import ErrorFeedback, Memory
from robustdist.comm.layout import Layout, Piece
from robustdist.comm.residuals import Residuals
from robustdist.comm.scratch import scratch
from robustdist.comm.verdicts import Verdicts, is_finite

__all__ = ["BucketEnds", "make_ends"]


class BucketEnds(Ends, ABC):
    """Ends of the large parameters of a bucket, for one step.

    Args:
        layout: Where they lie in the flat buffer.
        grads: Gradients by name; the means take their place.
        codec: Says what stands in the gaps.
        scale: Factor of a gradient scaler that they carry.
    """

    def __init__(self, layout: Layout, grads: Mapping[str, Tensor], codec: Compressor, scale: float) -> None:
        self.layout, self.grads, self.codec, self.scale = layout, grads, codec, scale

    def fill(self, begin: int, value: Tensor) -> None:
        """Let no gap change the scale of the block that it is in."""
        block = self.layout.block
        for piece in self.layout.pieces(begin, begin + len(value)):
            end = piece.start + piece.length - begin
            known = value[end - end % block : end]
            if len(known) and (filler := self.codec.fill(known)) is not None:
                value[end : end - end % block + block].copy_(filler)

    @abstractmethod
    def finish(self) -> list[str]:
        """End the step, and return the parameters whose mean is known not to be finite, if there is a memory."""

    def undo_bad(self) -> list[str]:
        """Undo what led to means that are not finite, and return the parameters."""
        return []


class GradientEnds(BucketEnds):
    """Error feedback, or nothing, between gradients and codec.

    All is done to a part while the codec has it in the caches, and there is no copy of the bucket: on a CPU the passes
    over memory cost more than the arithmetic.

    Args:
        memory: Residuals by name, or None.
        verdicts: Finds what is not finite; if it does so later, :meth:`undo_bad` has to be called after it did.
        *bucket: As in :class:`BucketEnds`.
    """

    def __init__(self, memory: ErrorFeedback | None, verdicts: Verdicts, *bucket: Any) -> None:
        super().__init__(*bucket)
        self.memory, self.verdicts, self.keeps = memory, verdicts, memory is not None
        # a copy where the order in memory is another one, such as channels_last
        self._flat = {place.name: self.grads[place.name].reshape(-1) for place in self.layout.places}
        whole = [Piece(place.name, 0, place.start, place.numel) for place in self.layout.places]
        self._residuals = None if memory is None else Residuals(memory, whole, self.scale, verdicts)
        self._bad: dict[str, None] = {}  # in order

    def load(self, begin: int, length: int) -> Tensor:
        """Return gradients and residuals; the gaps are zero."""
        device = next(iter(self._flat.values())).device
        value, end = scratch("load", length, torch.float32, device), 0
        for piece in self.layout.pieces(begin, begin + length):
            start = piece.start - begin
            value[end:start].zero_()
            end = start + piece.length
            value[start:end].copy_(self._of(piece))
        value[end:].zero_()
        if self._residuals is not None:
            self._residuals.add(begin, value)
        self.fill(begin, value)
        return value

    def keep(self, begin: int, value: Tensor, sent: Tensor) -> None:
        """Remember what was left out."""
        if self._residuals is not None:
            self._residuals.keep(begin, value, sent)

    def store(self, begin: int, mean: Tensor) -> None:
        """Overwrite the gradients."""
        doubtful = self.memory is not None and (self.verdicts.later or not is_finite(mean))
        for piece in self.layout.pieces(begin, begin + len(mean)):
            part = mean[piece.start - begin : piece.start - begin + piece.length]
            self._of(piece).copy_(part)
            if doubtful:
                self.verdicts.bad(part, partial(self._bad.setdefault, piece.name))

    def finish(self) -> list[str]:
        """Write back what is no view, and :meth:`undo_bad`, which all ranks do alike."""
        for name, flat in self._flat.items():
            if flat.data_ptr() != self.grads[name].data_ptr():
                self.grads[name].copy_(flat.view(self.grads[name].shape))
        return self.undo_bad()

    def undo_bad(self) -> list[str]:
        """Undo the residuals."""
        if self.memory is not None:
            for name in self._bad:
                self.memory.undo(name)
        return list(self._bad)

    def _of(self, piece: Piece) -> Tensor:
        return self._flat[piece.name][piece.offset : piece.offset + piece.length]


class MemoryEnds(BucketEnds):
    """Any other memory: it sees whole parameters, in buffers of the size of the bucket."""

    keeps = True

    def __init__(self, memory: Memory, *bucket: Any) -> None:
        super().__init__(*bucket)
        self.memory = memory
        device = next((grad.device for grad in self.grads.values()), torch.device("cpu"))
        # a thread has one bucket in work at a time
        self._flat, self._mean, self._sent = (
            scratch(f"bucket.{use}", self.layout.total, torch.float32, device) for use in ("flat", "mean", "sent")
        )
        self._loaded = False

    def load(self, begin: int, length: int) -> Tensor:
        """Return what the memory makes of the gradients."""
        if not self._loaded:
            self.layout.load(self.grads, self._flat)
            for place in self.layout.places:
                self.memory.prepare(place.name, place.of(self._flat), scale=self.scale)
            self.fill(0, self._flat)
            self._loaded = True
        return self._flat[begin : begin + length]

    def keep(self, begin: int, value: Tensor, sent: Tensor) -> None:
        """Note what is sent."""
        self._sent[begin : begin + len(sent)].copy_(sent)

    def store(self, begin: int, mean: Tensor) -> None:
        """Note the means."""
        self._mean[begin : begin + len(mean)].copy_(mean)

    def finish(self) -> list[str]:
        """Let the memory see what was sent and what came back."""
        bad = []
        for place in self.layout.places:
            mean = place.of(self._mean)
            self.memory.update(place.name, place.of(self._flat), place.of(self._sent), scale=self.scale)
            if not is_finite(mean):
                bad.append(place.name)
            self.memory.finish(place.name, mean, scale=self.scale)
        self.layout.store(self._mean, self.grads)
        return bad


def make_ends(
    layout: Layout,
    grads: Mapping[str, Tensor],
    codec: Compressor,
    memory: Memory | None,
    *,
    scale: float = 1.0,
    verdicts: Verdicts | None = None,
) -> BucketEnds:
    """Return the ends for the gradients of a bucket; see :class:`BucketEnds`.

    Args:
        layout: Where they lie in the flat buffer.
        grads: Gradients by name; the means take their place.
        codec: Says what stands in the gaps.
        memory: What is remembered of the gradients.
        scale: Factor of a gradient scaler that they carry.
        verdicts: Finds what is not finite, by default at once.
    """
    if memory is None or isinstance(memory, ErrorFeedback):
        return GradientEnds(memory, verdicts or Verdicts(), layout, grads, codec, scale)
    return MemoryEnds(memory, layout, grads, codec, scale)
