"""Codecs that work through a tensor in tiles, each encoded on its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

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

    def draws(self, out: Tensor, rank: int, step: int, name: str) -> torch.Generator | None:
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
        flat = x.view(-1)

        def load(begin: int, length: int) -> Tensor:
            part = flat[begin : begin + length]
            return part if part.dtype == torch.float32 else scratch("tile", length, torch.float32, x.device).copy_(part)

        self.encode_parts(len(flat), load, out, rank=rank, step=step, name=name)

    def encode_parts(
        self,
        numel: int,
        load: Callable[[int, int], Tensor],
        out: Tensor,
        keep: Callable[[int, Tensor, Tensor], object] | None = None,
        *,
        rank: int = 0,
        step: int = 0,
        name: str = "",
    ) -> None:
        """Load, encode and keep a tile, then the next one."""
        generator = self.draws(out, rank, step, name)
        again = None if keep is None else self.draws_again(out)
        for begin, length, start in self._tiles(numel):
            tile, end = load(begin, length), start + self.tile_bytes(length)
            self.encode_tile(tile, out[start:end], generator)
            out[end : start + self._stride].zero_()
            if keep is not None:
                sent = scratch("sent", length, torch.float32, out.device)
                self.decode_tile(out[start:end], sent, again)
                keep(begin, tile, sent)

    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Decode tile by tile."""
        flat, generator = out.view(-1), self.draws_again(data)
        for begin, length, start in self._tiles(len(flat)):
            target, source = flat[begin : begin + length], data[start : start + self.tile_bytes(length)]
            if alpha is None and target.dtype == torch.float32:
                self.decode_tile(source, target, generator)
            else:
                decoded = scratch("tile", length, torch.float32, out.device)
                self.decode_tile(source, decoded, generator)
                if alpha is None:
                    target.copy_(decoded)
                else:
                    target.add_(decoded, alpha=alpha)

    def decode_parts(
        self, numel: int, payloads: Sequence[Tensor], store: Callable[[int, Tensor], object], *, alpha: float = 1.0
    ) -> None:
        """Decode the same tile of all payloads, then the next one."""
        generators = [self.draws_again(data) for data in payloads]
        for begin, length, start in self._tiles(numel):
            total = scratch("sum", length, torch.float32, payloads[0].device)
            end = start + self.tile_bytes(length)
            self.decode_tile(payloads[0][start:end], total, generators[0])
            if alpha != 1.0:
                total.mul_(alpha)
            for data, generator in zip(payloads[1:], generators[1:], strict=True):
                decoded = scratch("tile", length, torch.float32, data.device)
                self.decode_tile(data[start:end], decoded, generator)
                total.add_(decoded, alpha=alpha)
            store(begin, total)

    def _tiles(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield begin, length and place in the payload of every tile."""
        start = self.head
        for begin in range(0, numel, self.tile):
            yield begin, min(self.tile, numel - begin), start
            start += self._stride

    @property
    def _stride(self) -> int:
        """Bytes from one tile to the next: every tile begins at a multiple of 4."""
        return -(-self.tile_bytes(self.tile) // 4) * 4


def floats(data: Tensor) -> Tensor:
    """View bytes as float32."""
    return data.view(torch.float32)
