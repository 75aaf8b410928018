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


#: Layouts kept per bucket, for sets of used parameters that come back.
_KEPT = 64


class Bucket:
    """Buffers for a set of parameters.

    Attributes:
        whole: Layout and collectives of all parameters.
        cuts: Those of the subsets that were used last, by the bits of the subset.
        cut: Those in use.
    """

    def __init__(self, cut: Cut, buffer: Tensor) -> None:
        self.whole = self.cut = cut
        self.cuts: dict[bytes, Cut] = {}
        self._side = buffer.new_empty(0, dtype=torch.float32)

    def side(self, extra: int) -> Tensor:
        """Return a buffer for the small parameters and ``extra`` more numbers."""
        length = self.cut.layout.side_total + extra
        if len(self._side) < length:
            self._side = self._side.new_empty(self.whole.layout.side_total + extra)
        return self._side[:length]


class Buckets:
    """Buckets by the names and shapes of their parameters.

    Args:
        cut: Makes a layout.
        moved: Called with a cut that comes into use, before anything is sent in it.
    """

    def __init__(self, cut: Callable[[Signature], Cut], moved: Callable[[Cut], None]) -> None:
        self._cut, self._moved = cut, moved
        self._buckets: dict[Signature, Bucket] = {}

    def find(
        self, grads: Mapping[str, Tensor], buffer: Tensor, used: Mapping[str, Tensor] | None = None, bits: bytes = b""
    ) -> Bucket:
        """Return the bucket of these parameters; a new one replaces those that share any with it.

        Args:
            grads: Gradients by name.
            buffer: A tensor on their device.
            used: Those to lay out, by default all.
            bits: Stands for ``used``.
        """
        signature = tuple((name, tuple(grad.shape)) for name, grad in grads.items())
        bucket = self._buckets.get(signature)
        new = bucket is None
        if bucket is None:
            shared = [key for key in self._buckets if any(name in grads for name, _ in key)]
            for key in shared:
                del self._buckets[key]
            bucket = self._buckets[signature] = Bucket(self._cut(signature), buffer)
        cut = bucket.cuts.pop(bits, None)
        if cut is None:
            cut = bucket.whole if used is None else self._cut(tuple(row for row in signature if row[0] in used))
        bucket.cuts[bits] = cut  # at the end: the first one is the one that was not used for the longest time
        if len(bucket.cuts) > _KEPT:
            del bucket.cuts[next(iter(bucket.cuts))]
        if new or cut != bucket.cut:
            bucket.cut = cut
            self._moved(cut)
        return bucket

    def recut(self) -> None:
        """Forget the buckets that would now be cut in another way, and all cuts of subsets."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if self._cut(key) == bucket.whole}
        for bucket in self._buckets.values():
            bucket.cuts.clear()
