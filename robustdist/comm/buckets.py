"""Layouts and buffers of the buckets that an engine has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robustdist.comm.cost import Collective
from robustdist.comm.layout import Layout

__all__ = ["Bucket", "Buckets", "Cut", "Signature"]

#: Names and shapes of the parameters of a bucket, in order.
Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Cut:
    """A layout, and the collective of each of its segments."""

    layout: Layout
    kinds: tuple[Collective, ...]


class Bucket:
    """Buffers for a set of parameters.

    Attributes:
        cut: The layout in use and its collectives.
        flat: What this rank sends, flat.
        mean: What all receive.
        sent: What all decode of ``flat``; ``mean`` itself where nobody asks.
        side: Small parameters, then the note, then the number of failed ranks.
    """

    def __init__(self, cut: Cut, buffer: Tensor, copies: int) -> None:
        self.cut = cut
        flats = [buffer.new_empty(cut.layout.total, dtype=torch.float32) for _ in range(copies)]
        self.flat, self.mean, self.sent = flats[0], flats[1], flats[-1]
        self.side = flats[0][:0]

    def make_side(self, extra: int) -> Tensor:
        """Return the side buffer with room for ``extra`` more numbers."""
        length = self.cut.layout.side_total + extra
        if len(self.side) != length:
            self.side = self.flat.new_empty(length)
        return self.side


class Buckets:
    """Buckets by the names and shapes of their parameters.

    Args:
        cut: Makes a layout.
        moved: Called with a cut that comes into use, before anything is sent in it.
        copies: 2, or 3 if ``sent`` is needed.
    """

    def __init__(self, cut: Callable[[Signature], Cut], moved: Callable[[Cut], None], *, copies: int) -> None:
        self._cut, self._moved, self._copies = cut, moved, copies
        self._buckets: dict[Signature, Bucket] = {}

    def find(self, grads: Mapping[str, Tensor], buffer: Tensor) -> Bucket:
        """Return the bucket of these parameters; a new one replaces those that share any with it."""
        signature = tuple((name, tuple(grad.shape)) for name, grad in grads.items())
        bucket = self._buckets.get(signature)
        if bucket is None:
            shared = [key for key in self._buckets if any(name in grads for name, _ in key)]
            for key in shared:
                del self._buckets[key]
            bucket = self._buckets[signature] = Bucket(self._cut(signature), buffer, self._copies)
            self._moved(bucket.cut)
        return bucket

    def recut(self) -> None:
        """Forget the buckets that would now be cut in another way."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if self._cut(key) == bucket.cut}
