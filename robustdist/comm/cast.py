"""Codecs that only change the number format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robustdist.comm.base import Compressor, count
from robustdist.comm.tiles import TileCodec

__all__ = ["BF16", "FP16", "Identity"]


class Identity(Compressor):
    """Sends the numbers as they are, in their own type.

    Example:
        >>> Identity().payload_bytes(1000)
        4000
    """

    unbiased = True
    linear = True

    def __init__(self) -> None:
        super().__init__()

    def payload_bytes(self, numel: int | Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the size of the tensor in bytes."""
        return count(numel) * dtype.itemsize

    def omega(self, numel: int) -> float:
        """Return 0: nothing is lost."""
        return 0.0

    def encode(self, x: Tensor, out: Tensor, *, rank: int = 0, step: int = 0, name: str = "") -> None:
        """Copy."""
        out.view(x.dtype).copy_(x.view(-1))

    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Copy, or add."""
        if alpha is None:
            out.view(-1).copy_(data.view(out.dtype))
        else:
            out.view(-1).add_(data.view(out.dtype), alpha=alpha)

    def summable(self, data: Tensor) -> Tensor:
        """Return the whole payload as float32."""
        return data.view(torch.float32)


class _Cast(TileCodec):
    """Rounds to a 16-bit type."""

    target: torch.dtype
    digits: int

    def __init__(self) -> None:
        super().__init__()

    def tile_bytes(self, numel: int) -> int:
        """Return 2 bytes per element."""
        return 2 * numel

    def delta(self, numel: int) -> float:
        r"""Return :math:`1 - 2^{-2p}` for p significant binary digits, true of entries in the normal range."""
        return 1 - 2.0 ** (-2 * self.digits)

    def encode_tile(self, x: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Round to nearest."""
        out.view(self.target).copy_(x)

    def decode_tile(self, data: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Widen."""
        out.copy_(data.view(self.target))


class FP16(_Cast):
    r"""Rounds to float16: relative error at most :math:`2^{-11}` for magnitudes from 6.1e-5 to 65504.

    A larger finite number becomes infinite, which every receiver sees, and one below 3e-8 becomes 0; divide a sum by
    the number of ranks before encoding it, not after. BF16 has the range of float32.

    Example:
        >>> FP16().decompress(FP16().compress(torch.tensor([0.1, 1e5])))
        tensor([0.1000,    inf])
    """

    target = torch.float16
    digits = 11


class BF16(_Cast):
    r"""Rounds to bfloat16: relative error at most :math:`2^{-8}` over the range of float32.

    Example:
        >>> BF16().decompress(BF16().compress(torch.tensor([0.1, 1e5])))
        tensor([1.0010e-01, 9.9840e+04])
    """

    target = torch.bfloat16
    digits = 8
