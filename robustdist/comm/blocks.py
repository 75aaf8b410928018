"""Codecs with one scale per block of consecutive elements."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from robustdist.comm.base import check_block
from robustdist.comm.scratch import TILE, scratch
from robustdist.comm.tiles import TileCodec, floats

__all__ = ["BlockCodec", "block_maximum", "block_sizes", "dither", "mark_bad_blocks", "spacing"]

#: Scales whose sum is below this are all finite, and so is every level times its scale.
_SAFE = 1e38
_LARGEST = torch.finfo(torch.float32).max


class BlockCodec(TileCodec):
    """A float32 scale per block of ``block`` elements, then the codes of all elements of the tile.

    The scale of a block with a non-finite entry is NaN, and so are all its decoded values. A last block that is not
    full counts as filled up with zeros, which are not sent.

    Args:
        block: Elements that share a scale, a multiple of 8.
        seed: Seed of the draws.
    """

    def __init__(self, *, block: int = 512, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.block = check_block(block)
        self.tile = max(1, TILE // block) * block

    @abstractmethod
    def code_bytes(self, numel: int) -> int:
        """Bytes for the codes of ``numel`` elements."""

    @abstractmethod
    def encode_blocks(
        self, blocks: Tensor, numel: int, scales: Tensor, out: Tensor, generator: torch.Generator | None
    ) -> None:
        """Write scales and codes.

        Args:
            blocks: Shape (b, block), float32, zeros after the first ``numel`` elements.
            numel: Number of elements.
            scales: Shape (b,), float32; overwritten.
            out: Shape (code_bytes(numel),), uint8; overwritten.
            generator: Source of draws, if this codec has any.
        """

    @abstractmethod
    def decode_blocks(self, scales: Tensor, codes: Tensor, numel: int, out: Tensor) -> None:
        """Overwrite ``out``, shape (b, block), float32; what is written after ``numel`` elements does not matter."""

    def tile_bytes(self, numel: int) -> int:
        """Return 4 bytes per block and the codes."""
        return 4 * -(-numel // self.block) + self.code_bytes(numel)

    def encode_tile(self, x: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Pad the last block and encode."""
        numel = len(x)
        num_blocks = -(-numel // self.block)
        if numel % self.block:
            padded = scratch("block", num_blocks * self.block, torch.float32, x.device)
            padded[:numel].copy_(x)
            padded[numel:].zero_()
            x = padded
        scales, codes = floats(out[: 4 * num_blocks]), out[4 * num_blocks :]
        self.encode_blocks(x.view(num_blocks, self.block), numel, scales, codes, generator)

    def decode_tile(self, data: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Decode whole blocks and cut the last one."""
        numel = len(out)
        num_blocks = -(-numel // self.block)
        whole = out
        if numel % self.block:
            whole = scratch("block", num_blocks * self.block, torch.float32, out.device)
        scales, codes = floats(data[: 4 * num_blocks]), data[4 * num_blocks :]
        self.decode_blocks(scales, codes, numel, whole.view(num_blocks, self.block))
        if whole is not out:
            out.copy_(whole[:numel])


def block_maximum(blocks: Tensor, scales: Tensor) -> None:
    """Write the largest magnitude of every row into ``scales``; NaN if one of the row is NaN."""
    work = scratch("places", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
    torch.amax(torch.abs(blocks, out=work), 1, out=scales)


def mark_bad_blocks(scales: Tensor) -> Tensor | None:
    """Set non-finite scales to NaN and return where, or None if all are finite and none is near the largest float."""
    if not scales.is_cuda and scales.sum().item() < _SAFE:
        return None
    bad = torch.isfinite(scales).logical_not_()
    scales.masked_fill_(bad, math.nan)
    return bad


def dither(numel: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return draws (int16) that are odd, so that their distribution is symmetric about 0 and never reaches a tie."""
    lanes = scratch("draws", -(-numel // 4), torch.int64, device)
    lanes.random_(-(2**63), None, generator=generator).bitwise_or_(0x0001000100010001)
    return lanes.view(torch.int16)[:numel]


def spacing(scales: Tensor, levels: float) -> tuple[Tensor, Tensor | None]:
    """Turn maxima, in place, into the distance of ``levels`` equal steps up to them.

    Returns:
        The inverse distances, 0 where the block is zero or the inverse is not finite, and :func:`mark_bad_blocks`.
    """
    bad = mark_bad_blocks(scales)
    scales.div_(levels)
    if bad is not None:
        scales.clamp_(max=_LARGEST / levels * (1 - 2.0**-23))  # the highest level must not round to infinity
    return scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0), bad


def block_sizes(blocks: Tensor, numel: int) -> Tensor | int:
    """Elements per block: the last one may hold fewer."""
    rows, block = blocks.shape
    if numel == rows * block:
        return block
    sizes = torch.full((rows,), block, device=blocks.device)
    sizes[-1] = numel - (rows - 1) * block
    return sizes
