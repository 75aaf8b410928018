"""Where the gradients of a bucket lie in one flat buffer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Layout", "Piece", "Place"]


@dataclass(frozen=True)
class Place:
    """A parameter and its part ``[start, start + numel)`` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """Return the part of ``flat`` that belongs to the parameter."""
        return flat[self.start : self.start + self.numel]


@dataclass(frozen=True)
class Piece:
    """A stretch of one parameter: ``length`` elements from ``offset``, which are at ``start`` of the flat buffer."""

    name: str
    offset: int
    start: int
    length: int


class Layout:
    """Large parameters one after the other, each from the start of a block; small ones side by side.

    No block of a codec spans two parameters, so a parameter without gradient stays exactly at zero whatever its
    neighbours do. The gaps are zero. Small parameters, for which scales and headers would cost more than is gained,
    have a buffer of their own that travels uncompressed.

    Args:
        named_shapes: Names and shapes in the order of the bucket, equal on all ranks.
        block: Multiple at which large parameters begin.
        small: Parameters of fewer elements are small.
        whole: Names of parameters that count as small whatever their size.

    Attributes:
        block: As given.
        places: Large parameters, in ``total`` elements of the flat buffer.
        sides: Small parameters, in ``side_total`` elements of the side buffer.
    """

    def __init__(
        self,
        named_shapes: Sequence[tuple[str, Sequence[int]]],
        *,
        block: int = 512,
        small: int = 1024,
        whole: Collection[str] = (),
    ) -> None:
        self.block = block
        self.signature = tuple((name, tuple(shape)) for name, shape in named_shapes)
        places, sides = [], []
        self.total = self.side_total = 0
        for name, shape in self.signature:
            numel = math.prod(shape)
            if numel < small or name in whole:
                sides.append(Place(name, shape, self.side_total))
                self.side_total += numel
            else:
                places.append(Place(name, shape, self.total))
                self.total += -(-numel // block) * block
        self.places, self.sides = tuple(places), tuple(sides)
        self._starts = [place.start for place in places]

    def __eq__(self, other: object) -> bool:
        """Whether everything is at the same place, in the same blocks."""
        if not isinstance(other, Layout):
            return NotImplemented
        return (self.block, self.places, self.sides) == (other.block, other.places, other.sides)

    def __hash__(self) -> int:
        """Equal layouts have equal parameters."""
        return hash(self.signature)

    def load(self, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        """Copy the large gradients into the flat buffer and clear the gaps."""
        end = 0
        for place in self.places:
            flat[end : place.start].zero_()
            place.of(flat).view(place.shape).copy_(tensors[place.name])
            end = place.start + place.numel
        flat[end : self.total].zero_()

    def load_sides(self, tensors: Mapping[str, Tensor], side: Tensor) -> None:
        """Copy the small ones into their buffer."""
        for place in self.sides:
            place.of(side).view(place.shape).copy_(tensors[place.name])

    def store(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the flat buffer back."""
        for place in self.places:
            tensors[place.name].copy_(place.of(flat).view(place.shape))

    def store_sides(self, side: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the buffer of the small ones back."""
        for place in self.sides:
            tensors[place.name].copy_(place.of(side).view(place.shape))

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the stretches of parameters in ``[begin, end)`` of the flat buffer."""
        for number in range(max(bisect_right(self._starts, begin) - 1, 0), len(self.places)):
            place = self.places[number]
            if place.start >= end:
                return
            low, high = max(begin, place.start), min(end, place.start + place.numel)
            if low < high:
                yield Piece(place.name, low - place.start, low, high - low)
