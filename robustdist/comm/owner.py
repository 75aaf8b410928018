"""Error feedback of the rank that averages a chunk and encodes the average."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from robustdist.comm.error_feedback import ErrorFeedback
from robustdist.comm.layout import Layout, Piece

__all__ = ["OwnerResiduals"]


class OwnerResiduals(ErrorFeedback):
    """Residuals of the pieces of parameters in this rank's chunks, each under the name of the parameter and its place.

    Chunks are cut anew when DDP cuts its buckets anew, and another rank may then own a piece. :meth:`give_back` turns
    what was kept into a residual of this rank as a worker; nothing is lost and nothing has to be sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: dict[str, Piece] = {}

    def view(self, layout: Layout, begin: int, scale: float) -> _SegmentResiduals:
        """Return the part for one segment, which starts at ``begin`` of the flat buffer."""
        return _SegmentResiduals(self, layout, begin, scale)

    def parts(self, layout: Layout, begin: int, length: int) -> Iterator[tuple[str, slice]]:
        """Yield name and place of every piece in a chunk of ``length`` elements from ``begin`` of the flat buffer."""
        for piece in layout.pieces(begin, begin + length):
            key = f"{piece.name}@{piece.offset}"
            self._pieces[key] = piece
            yield key, slice(piece.start - begin, piece.start - begin + piece.length)

    def undo_parameter(self, name: str) -> None:
        """Undo the changes of all pieces of a parameter since the last commit."""
        for key, piece in self._pieces.items():
            if piece.name == name:
                self.undo(key)

    def give_back(self, layout: Layout, workers: ErrorFeedback, world_size: int) -> None:
        """Move the residuals of the parameters of ``layout`` to this rank's residuals as a worker.

        The mean counts those 1 / n times, and the owner's once: hence the factor n.
        """
        sizes = {place.name: place.numel for place in layout.places}
        for key, piece in list(self._pieces.items()):
            if piece.name in sizes:
                error = self.get(key)
                if error is not None:
                    workers.add(piece.name, sizes[piece.name], piece.offset, error.float() * world_size)
                self.drop(key)
                del self._pieces[key]


class _SegmentResiduals:
    """The :class:`~robustdist.comm.collectives.Owner` of one segment."""

    def __init__(self, residuals: OwnerResiduals, layout: Layout, begin: int, scale: float) -> None:
        self.residuals, self.layout, self.begin, self.scale = residuals, layout, begin, scale

    def prepare(self, mean: Tensor, begin: int) -> None:
        """Add the residuals."""
        for key, part in self.residuals.parts(self.layout, self.begin + begin, len(mean)):
            self.residuals.prepare(key, mean[part], scale=self.scale)

    def update(self, mean: Tensor, sent: Tensor, begin: int) -> None:
        """Keep what the second encoding leaves out."""
        for key, part in self.residuals.parts(self.layout, self.begin + begin, len(mean)):
            self.residuals.update(key, mean[part], sent[part], scale=self.scale)
