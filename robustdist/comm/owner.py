"""Error feedback of the rank that averages a chunk and encodes the average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from robustdist.comm.error_feedback import ErrorFeedback
from robustdist.comm.layout import Layout, Piece
from robustdist.comm.residuals import Residuals
from robustdist.comm.verdicts import Verdicts

__all__ = ["OwnerResiduals"]


class OwnerResiduals(ErrorFeedback):
    """Residuals of the pieces of parameters in this rank's chunks, each under the name of the parameter and its place.

    Chunks are cut anew when DDP cuts its buckets anew, and another rank may then own a piece. :meth:`give_back` turns
    what was kept into a residual of this rank as a worker; nothing is lost and nothing has to be sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: dict[str, Piece] = {}

    def view(self, layout: Layout, scale: float, verdicts: Verdicts | None = None) -> _ChunkResiduals:
        """Return what one exchange needs."""
        return _ChunkResiduals(self, layout, scale, verdicts or Verdicts())

    def pieces(self, layout: Layout, begin: int, length: int) -> list[Piece]:
        """Return the pieces in a chunk of ``length`` elements from ``begin`` of the flat buffer, by their own names."""
        found = []
        for piece in layout.pieces(begin, begin + length):
            key = _key(piece)
            self._pieces[key] = piece
            found.append(replace(piece, name=key))
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over copies of what :meth:`state_dict` returned; everything else is forgotten."""
        super().load_state_dict(state)
        self._pieces = {}
        for key, vector in state["residual"].items():
            name, _, offset = key.rpartition("@")
            self._pieces[key] = Piece(name, int(offset), 0, len(vector))

    def _parameter(self, name: str) -> str:
        return self._pieces[name].name

    def undo_parameter(self, name: str) -> None:
        """Undo the changes of all pieces of a parameter since the last commit."""
        for key, piece in self._pieces.items():
            if piece.name == name:
                self.undo(key)

    def drop_parameter(self, name: str) -> None:
        """Forget all pieces of a parameter."""
        for key in [key for key, piece in self._pieces.items() if piece.name == name]:
            self.drop(key)
            del self._pieces[key]

    def give_back(
        self, layout: Layout, owned: Sequence[tuple[int, int]], workers: ErrorFeedback, world_size: int
    ) -> None:
        """Move residuals of the parameters of ``layout`` that this rank no longer owns to its residuals as a worker.

        The mean counts those 1 / n times, and the owner's once: hence the factor n.

        Args:
            layout: The new layout of these parameters.
            owned: Begin and end of this rank's chunks in its flat buffer.
            workers: Residuals of this rank as a sender.
            world_size: Number of ranks n.
        """
        sizes = {place.name: place.numel for place in (*layout.places, *layout.sides)}
        stays = {_key(piece): piece.length for begin, end in owned for piece in layout.pieces(begin, end)}
        for key, piece in list(self._pieces.items()):
            if piece.name in sizes and stays.get(key) != piece.length:
                error = self.get(key)
                if error is not None:
                    workers.add(piece.name, sizes[piece.name], piece.offset, error.float() * world_size)
                self.drop(key)
                del self._pieces[key]


def _key(piece: Piece) -> str:
    return f"{piece.name}@{piece.offset}"


class _ChunkResiduals:
    """The :class:`~robustdist.comm.ends.Owner` of one exchange."""

    def __init__(self, residuals: OwnerResiduals, layout: Layout, scale: float, verdicts: Verdicts) -> None:
        self._all, self._layout, self._scale, self._verdicts = residuals, layout, scale, verdicts

    def open(self, begin: int, length: int) -> None:
        """Find the pieces of the chunk."""
        pieces = self._all.pieces(self._layout, begin, length)
        self._own = Residuals(self._all, pieces, self._scale, self._verdicts)

    def prepare(self, begin: int, mean: Tensor) -> None:
        """Add the residuals."""
        self._own.add(begin, mean)

    def update(self, begin: int, mean: Tensor, sent: Tensor) -> None:
        """Keep what the second encoding leaves out."""
        self._own.keep(begin, mean, sent)
