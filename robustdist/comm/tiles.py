"""Codecs that work through a tensor in tiles, each encoded on its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from robustdist.comm.base import Compressor, count
from robustdist.comm.scratch import TILE, scratch

__all__ = ["TileCodec", "floats"]


class TileCodec(Compressor):
    """A payload is a row of tile payloads, so pieces of a tensor cut at tiles have pieces of its payload.

    Temporaries are never larger than a tile: fresh ones of the size of a gradient cost more than the arithmetic.

    Attributes:
        tile: Elements per tile.
    """

    tile: int = TILE

    @abstractmethod
    def tile_bytes(self, numel: int) -> int:
        """Bytes of a tile of ``numel`` elements."""

    @abstractmethod
    def encode_tile(self, x: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Write the payload of ``x`` (flat float32, at most ``tile`` elements) into ``out``."""

    @abstractmethod
    def decode_tile(self, data: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Overwrite ``out`` (flat float32) with what ``data`` stands for."""

    def draws(self, x: Tensor, out: Tensor, rank: int, step: int, name: str) -> torch.Generator | None:
        """Return the generator for the tiles of one payload, in order; may write the head of ``out``."""
        return None

    def draws_again(self, data: Tensor) -> torch.Generator | None:
        """Return a generator in the state in which the sender's was, if the receiver has to draw."""
        return None

    def payload_bytes(self, numel: int | Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes on the wire for ``numel`` elements or a shape; the same for every ``dtype``."""
        tiles, rest = divmod(count(numel), self.tile)
        last = self.tile_bytes(rest) if rest else self.tile_bytes(self.tile) if tiles else 0
        return self.head + (tiles - (rest == 0 and tiles > 0)) * self._stride + last

    def encode(self, x: Tensor, out: Tensor, *, rank: int = 0, step: int = 0, name: str = "") -> None:
        """Encode tile by tile."""
        flat, start = x.view(-1), self.head
        generator = self.draws(x, out, rank, step, name)
        for begin in range(0, flat.numel(), self.tile):
            source = flat[begin : begin + self.tile]
            if source.dtype != torch.float32:
                source = scratch("tile", len(source), torch.float32, x.device).copy_(source)
            size = self.tile_bytes(len(source))
            self.encode_tile(source, out[start : start + size], generator)
            out[start + size : start + self._stride].zero_()
            start += self._stride

    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Decode tile by tile."""
        flat, start = out.view(-1), self.head
        generator = self.draws_again(data)
        for begin in range(0, flat.numel(), self.tile):
            target = flat[begin : begin + self.tile]
            source = data[start : start + self.tile_bytes(len(target))]
            if alpha is None and target.dtype == torch.float32:
                self.decode_tile(source, target, generator)
            else:
                decoded = scratch("tile", len(target), torch.float32, out.device)
                self.decode_tile(source, decoded, generator)
                if alpha is None:
                    target.copy_(decoded)
                else:
                    target.add_(decoded, alpha=alpha)
            start += self._stride

    @property
    def _stride(self) -> int:
        """Bytes from one tile to the next: every tile begins at a multiple of 4."""
        return -(-self.tile_bytes(self.tile) // 4) * 4


def floats(data: Tensor) -> Tensor:
    """View bytes as float32."""
    return data.view(torch.float32)
