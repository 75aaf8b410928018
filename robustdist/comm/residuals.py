"""Residuals of a stretch of a flat buffer, read and rewritten a part at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from robustdist.comm.error_feedback import ErrorFeedback
from robustdist.comm.layout import Piece
from robustdist.comm.verdicts import Verdicts

__all__ = ["Residuals"]


class Residuals:
    """What :class:`ErrorFeedback` keeps under several names, laid out in a row.

    All parts of a piece have to be kept, unless something of it is not finite: then all of the piece stays as it was.

    Args:
        memory: Keeps a vector per name, of the length of the piece.
        pieces: Names with their places, in ascending order; ``offset`` plays no role.
        scale: Factor that the values carry and the residuals do not.
        verdicts: Finds what is not finite.
    """

    def __init__(self, memory: ErrorFeedback, pieces: Sequence[Piece], scale: float, verdicts: Verdicts) -> None:
        self.memory, self.pieces, self.scale, self.verdicts = memory, pieces, scale, verdicts
        self._starts = [piece.start for piece in pieces]
        self._vectors: dict[str, tuple[Tensor | None, Tensor]] = {}
        self._bad: set[str] = set()

    def add(self, begin: int, value: Tensor) -> None:
        """Add the residuals of the elements from ``begin`` to ``value``."""
        for piece, inside, part in self._parts(begin, value):
            kept, _ = self._open(piece, value)
            if kept is not None:
                part.add_(kept[inside], alpha=self.scale)

    def keep(self, begin: int, value: Tensor, sent: Tensor) -> None:
        """Make ``value - sent`` the residuals of the elements from ``begin``."""
        for piece, inside, part in self._parts(begin, value):
            if piece.name in self._bad:
                continue
            new = self._open(piece, value)[1][inside]
            offset = max(piece.start - begin, 0)
            torch.sub(part, sent[offset : offset + len(part)], out=new)
            if self.scale != 1.0:
                new.div_(self.scale)
            if self.verdicts.bad(new, partial(self.memory.undo, piece.name)):
                self._bad.add(piece.name)

    def _open(self, piece: Piece, like: Tensor) -> tuple[Tensor | None, Tensor]:
        if piece.name not in self._vectors:
            self._vectors[piece.name] = self.memory.open(piece.name, piece.length, like.device)
        return self._vectors[piece.name]

    def _parts(self, begin: int, value: Tensor) -> Iterator[tuple[Piece, slice, Tensor]]:
        """Yield the pieces that ``value`` covers, where in them, and the part of ``value``."""
        end = begin + len(value)
        for place in range(max(bisect_right(self._starts, begin) - 1, 0), len(self.pieces)):
            piece = self.pieces[place]
            low, high = max(begin, piece.start), min(end, piece.start + piece.length)
            if piece.start >= end:
                return
            if low < high:
                yield piece, slice(low - piece.start, high - piece.start), value[low - begin : high - begin]
