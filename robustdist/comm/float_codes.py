"""Codes with a binary exponent: powers of two, and 8-bit floating point."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.blocks import BlockCodec, block_maximum, dither, mark_bad_blocks, spacing
from robustdist.comm.scratch import scratch
from robustdist.errors import UsageError

__all__ = ["FP8", "Natural"]

_SIGN = -(2**31)
_EXPONENT = 0x7F800000


class Natural(BlockCodec):
    r"""Rounds every magnitude to one of the two neighbouring powers of two: a sign and seven bits of exponent.

    .. math:: 2^a \le |x| < 2^{a+1}: \quad C(x) = \mathrm{sign}(x)\, 2^{a + b}, \quad P(b = 1) = |x| / 2^a - 1

    Exponents count downwards from the power of two above the largest magnitude of the block; what is 126 or more
    powers below becomes 0.

    Args:
        block: Entries that share the reference exponent, a multiple of 8.
        stochastic: False rounds to the nearer power, up from :math:`1.5 \cdot 2^a`.
        seed: Seed of the draws.

    Raises:
        UsageError: If ``block`` is out of range.

    References:
        Horvath et al., "Natural Compression for Distributed Deep Learning".

    Example:
        >>> codec = Natural(stochastic=False)
        >>> codec.decompress(codec.compress(torch.tensor([1.0, -2.9, 3.1, 0.0])))
        tensor([ 1., -2.,  4.,  0.])
    """

    def __init__(self, *, block: int = 512, stochastic: bool = True, seed: int = 0) -> None:
        super().__init__(block=block, seed=seed)
        self.stochastic = stochastic
        self.unbiased = stochastic

    def omega(self, numel: int) -> float | None:
        """Return 1/8, reached by 4/3 of a power of two."""
        return 1 / 8 if self.stochastic else None

    def delta(self, numel: int) -> float:
        """Return 7/8, or 8/9 for the nearer power (half way between two)."""
        return 7 / 8 if self.stochastic else 8 / 9

    def contractive(self) -> Compressor:
        """Return the codec itself: the draws leave it a contraction."""
        return self

    def draws(self, out: Tensor, rank: int, step: int, name: str) -> torch.Generator | None:
        """Return the generator of this payload."""
        return self.generator(out.device, "round", rank, step, name) if self.stochastic else None

    def code_bytes(self, numel: int) -> int:
        """Return a byte per element."""
        return numel

    def encode_blocks(
        self, blocks: Tensor, numel: int, scales: Tensor, out: Tensor, generator: torch.Generator | None
    ) -> None:
        """Round in the bits of the float: a carry out of the mantissa is the next power of two."""
        block_maximum(blocks, scales)
        bad = mark_bad_blocks(scales)
        # the power of two above the maximum; that of the largest floats does not exist, so they saturate at 2 ** 127
        power = scales.view(torch.int32)
        power.bitwise_and_(_EXPONENT).add_(1 << 23).clamp_(max=0x7F000000)
        below_one = scratch("places", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
        torch.mul(blocks, scales.reciprocal()[:, None], out=below_one)
        if bad is not None:
            scales.masked_fill_(bad, torch.nan)
        bits = below_one.view(torch.int32).view(-1)
        signs = scratch("signs", bits.numel(), torch.int32, bits.device)
        torch.bitwise_and(bits, _SIGN, out=signs).bitwise_right_shift_(24)
        bits.bitwise_and_(~_SIGN).add_(1 << 22)
        if generator is not None:
            bits.add_(dither(bits.numel(), bits.device, generator), alpha=1 << 7)
        bits.bitwise_right_shift_(23).clamp_(max=127).add_(signs)
        out.view(torch.int8).copy_(bits[:numel])

    def decode_blocks(self, scales: Tensor, codes: Tensor, numel: int, out: Tensor) -> None:
        """Put sign and exponent back into the bits of a float."""
        bits = scratch("places", out.numel(), torch.int32, out.device)
        bits[:numel].copy_(codes.view(torch.int8))
        signs = scratch("signs", out.numel(), torch.int32, out.device)
        torch.bitwise_and(bits, _SIGN, out=signs)
        bits.bitwise_and_(127).bitwise_left_shift_(23).bitwise_or_(signs)
        torch.mul(bits.view(torch.float32).view_as(out), scales[:, None], out=out)


class FP8(BlockCodec):
    r"""Eight-bit floating point, with blocks scaled so that their largest magnitude is the largest of the format.

    The relative error is at most :math:`2^{-4}` (e4m3) or :math:`2^{-3}` (e5m2) down to :math:`3.5 \cdot 10^{-5}` or
    :math:`1.1 \cdot 10^{-9}` of the maximum, absolute below. On a CPU ``Int8`` is faster and more exact; this is for
    runs that should behave as on accelerators.

    Args:
        format: "e4m3" or "e5m2".
        block: Entries that share a scale, a multiple of 8.

    Raises:
        UsageError: If an argument is out of range, or torch has no such type.

    Example:
        >>> FP8("e4m3").decompress(FP8("e4m3").compress(torch.tensor([448.0, 17.0, 0.0])))
        tensor([448.,  16.,   0.])
    """

    def __init__(self, format: Literal["e4m3", "e5m2"] = "e4m3", block: int = 512) -> None:
        super().__init__(block=block)
        if format not in ("e4m3", "e5m2"):
            raise UsageError(f"format={format!r} must be 'e4m3' or 'e5m2'")
        kind = getattr(torch, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[format], None)
        if kind is None:
            raise UsageError(f"format={format!r}: this torch has no 8-bit floating point, use Int8 instead")
        self.format = format
        self._kind = kind
        self._largest = torch.finfo(kind).max

    def delta(self, numel: int) -> float:
        """Return 1 minus the square of the largest relative error, and what the smallest entries of a block lose."""
        relative, absolute = (2.0**-4, 2.0**-10) if self.format == "e4m3" else (2.0**-3, 2.0**-17)
        return 1 - relative**2 - max(min(self.block, numel) - 1, 0) * (absolute / self._largest) ** 2

    def code_bytes(self, numel: int) -> int:
        """Return a byte per element."""
        return numel

    def encode_blocks(
        self, blocks: Tensor, numel: int, scales: Tensor, out: Tensor, generator: torch.Generator | None
    ) -> None:
        """Scale and cast."""
        block_maximum(blocks, scales)
        inverse, bad = spacing(scales, self._largest)
        scaled = scratch("places", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
        torch.mul(blocks, inverse[:, None], out=scaled)
        if bad is not None:
            scaled.masked_fill_(bad[:, None], 0)
        out.view(self._kind).copy_(scaled.view(-1)[:numel])

    def decode_blocks(self, scales: Tensor, codes: Tensor, numel: int, out: Tensor) -> None:
        """Shift the bits to where float16 has them; torch's own cast of e4m3 is ten times slower on a CPU."""
        bits = scratch("halves", out.numel(), torch.int16, out.device)
        bits[:numel].copy_(codes.view(torch.int8))
        if self.format == "e5m2":
            bits.bitwise_left_shift_(8)
        else:
            # sign, four bits of exponent, mantissa; float16's exponent counts from 8 further up
            bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.view(-1).copy_(bits.view(torch.float16))
        out.mul_(scales[:, None] if self.format == "e5m2" else scales[:, None] * 256)
