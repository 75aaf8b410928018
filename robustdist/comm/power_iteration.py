"""Means of matrices over ranks by one power iteration on their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.collectives import Exchange
from robustdist.comm.layout import Place
from robustdist.comm.low_rank import PowerSGD, orthonormalise
from robustdist.comm.scratch import scratch
from robustdist.comm.verdicts import is_finite

__all__ = ["LowRank", "WarmStarts", "is_low_rank"]


def is_low_rank(codec: PowerSGD, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix whose factors are smaller than itself."""
    return len(shape) >= 2 and codec.dims(shape)[2] > 0


class WarmStarts:
    """The starts in a codec, with a way back to those of the last committed step."""

    def __init__(self) -> None:
        self._before: dict[str, Callable[[], None]] = {}

    def keep(self, codec: PowerSGD, name: str, old: Tensor, new: Tensor) -> None:
        """Start the next iteration of ``name`` with ``new``, unless there is a rollback to ``old``."""
        self._before.setdefault(name, lambda: codec.keep_start(name, old))
        codec.keep_start(name, new)

    def commit(self) -> None:
        """Make the starts final."""
        self._before = {}

    def rollback(self) -> None:
        """Put the starts back."""
        for restore in self._before.values():
            restore()
        self._before = {}


class LowRank(Exchange):
    r"""The rank-r part of the mean of matrices, for all matrices of a bucket in two all-reduces.

    .. math::
        P = \mathrm{orth}\Bigl(\frac1n \sum_i M_i Q\Bigr), \qquad Q \leftarrow \frac1n \sum_i M_i^\top P, \qquad
        \hat M = P Q^\top

    All ranks make :math:`\hat M` of the same P and Q by the same operations, so they get the same bits if their
    processors are of one kind. A rank sends 2 (n - 1) / n times the factors, 4 r (rows + columns) bytes per matrix. A
    non-finite entry on any rank spoils the whole matrix, on all ranks, and no start.

    Args:
        *args: As in :class:`~robustdist.comm.collectives.Exchange`; the codec is a ``PowerSGD``.
        places: Where the matrices are in the stretch, without gaps; each has at least two dimensions.
        starts: Takes the Q of the next step.
        **exchange: As in the base class.

    What the ends keep is the difference to the mean, which all ranks decode, not to a part of the own matrices.

    References:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization".
    """

    num_stages = 3
    codec: PowerSGD

    def __init__(self, *args: Any, places: Sequence[Place], starts: WarmStarts, **exchange: Any) -> None:
        super().__init__(*args, **exchange)
        self.places, self.starts = places, starts
        self.dims = [self.codec.dims(place.shape) for place in places]
        self._left: list[Tensor] = []

    def advance(self, stage: int) -> None:
        """Send P; make it orthonormal and send Q; multiply."""
        (self._project, self._iterate, self._rebuild)[stage]()

    def _project(self) -> None:
        self._packed, parts = self._pack([rank * rows for rows, _, rank in self.dims])
        with self.keeping_errors():
            # stays where it is: no other exchange of this thread is under way
            self._x = self.ends.load(self.begin, self.numel)
            for place, part, (rows, columns, rank) in zip(self.places, parts, self.dims, strict=True):
                start = self._start(place, rank, columns)
                torch.mm(start, place.of(self._x).view(rows, columns).T, out=part.view(rank, rows))
        self._reduce()

    def _iterate(self) -> None:
        self.wait()
        lefts = torch.split(self._packed, [rank * rows for rows, _, rank in self.dims])
        self._packed, parts = self._pack([rank * columns for _, columns, rank in self.dims])
        with self.keeping_errors():
            for place, left, part, (rows, columns, rank) in zip(self.places, lefts, parts, self.dims, strict=True):
                # in memory of its own, as in the codec: the last bits of a product depend on the alignment
                basis = left.view(rank, rows).clone()
                orthonormalise(basis)
                self._left.append(basis)
                torch.mm(basis, place.of(self._x).view(rows, columns), out=part.view(rank, columns))
        self._reduce()

    def _rebuild(self) -> None:
        self.wait()
        rights = torch.split(self._packed, [rank * columns for _, columns, rank in self.dims])
        product = scratch("product", self.numel, torch.float32, self.device)
        with self.keeping_errors():
            for place, basis, flat, (rows, columns, rank) in zip(
                self.places, self._left, rights, self.dims, strict=True
            ):
                right = flat.view(rank, columns).clone()
                place.of(product).view(rows, columns).copy_(torch.mm(basis.T, right))
                if is_finite(right):
                    self.starts.keep(self.codec, place.name, self._start(place, rank, columns), right)
            self.ends.store(self.begin, product)
            if self.ends.keeps:
                self.ends.keep(self.begin, self._x, product)

    def _start(self, place: Place, rank: int, columns: int) -> Tensor:
        return self.codec.start(place.name, rank, columns, self.device)

    def _pack(self, sizes: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return zeros, which is what the others get if this rank fails, and their parts."""
        packed = torch.zeros(sum(sizes), device=self.device)
        return packed, torch.split(packed, list(sizes))

    def _reduce(self) -> None:
        self._packed.mul_(1 / self.world_size)
        self._work = dist.all_reduce(self._packed, group=self.group, async_op=True)
        self.bytes_sent += 2 * (self.world_size - 1) * self._packed.numel() * 4 // self.world_size
