"""Uniform quantisers: evenly spaced levels up to the largest magnitude of each block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.bitpack import pack, pack_trits, packed_bytes, trit_bytes, unpack, unpack_trits
from robustdist.comm.blocks import BlockCodec, block_maximum, block_sizes, dither, spacing
from robustdist.comm.scratch import scratch
from robustdist.errors import UsageError
from robustdist.types import Number, parse_number

__all__ = ["QSGD", "Int8", "TernGrad"]


class _Uniform(BlockCodec):
    r"""Levels :math:`-s, \dots, s`, evenly spaced up to the largest magnitude N of the block.

    With :math:`h = N/s`, an entry x becomes :math:`h \cdot \mathrm{round}(x/h + u)`, u uniform in (-1/2, 1/2) if
    ``stochastic``, otherwise 0. The scale on the wire is h.
    """

    bits: int
    levels: int
    clips: bool = False

    def __init__(self, *, block: int, stochastic: bool, seed: int) -> None:
        super().__init__(block=block, seed=seed)
        self.stochastic = stochastic
        self.unbiased = stochastic

    def omega(self, numel: int) -> float | None:
        r"""Return :math:`(\sqrt{1 + (B-1)/s^2} - 1)/2`, reached when one entry is N and all others are alike."""
        if not self.unbiased:
            return None
        return (math.sqrt(1 + max(min(self.block, numel) - 1, 0) / self.levels**2) - 1) / 2

    def delta(self, numel: int) -> float | None:
        r"""Return :math:`4s^2/(4s^2 + B - 1)` for nearest levels: all but the largest entry of a block off by h/2."""
        if self.stochastic:
            return super().delta(numel)
        return 4 * self.levels**2 / (4 * self.levels**2 + max(min(self.block, numel) - 1, 0))

    def draws(self, out: Tensor, rank: int, step: int, name: str) -> torch.Generator | None:
        """Return the generator of this payload."""
        return self.generator(out.device, "round", rank, step, name) if self.stochastic else None

    def block_scale(self, blocks: Tensor, numel: int, scales: Tensor) -> None:
        """Write the value of the highest level per block into ``scales``."""
        block_maximum(blocks, scales)

    def encode_blocks(
        self, blocks: Tensor, numel: int, scales: Tensor, out: Tensor, generator: torch.Generator | None
    ) -> None:
        """Divide by the spacing, round, pack."""
        self.block_scale(blocks, numel, scales)
        inverse, bad = spacing(scales, self.levels)
        places = scratch("places", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
        torch.mul(blocks, inverse[:, None], out=places)
        if bad is not None:
            places.masked_fill_(bad[:, None], 0)
        if generator is not None:
            places.view(-1).add_(dither(places.numel(), places.device, generator), alpha=2.0**-16)
        places.round_()
        if self.levels == 127 or self.clips:
            places.clamp_(-self.levels, self.levels)  # 127 and a rounding error plus almost 1/2 would leave int8
        codes = scratch("codes", blocks.numel(), torch.int8, blocks.device)
        codes.copy_(places.view(-1))
        self.write(codes[:numel], out)

    def decode_blocks(self, scales: Tensor, codes: Tensor, numel: int, out: Tensor) -> None:
        """Multiply the levels by the spacing."""
        levels = scratch("codes", out.numel(), torch.int8, out.device)
        self.read(codes, levels[:numel])
        out.view(-1).copy_(levels)
        out.mul_(scales[:, None])

    def code_bytes(self, numel: int) -> int:
        """Return the bytes of ``bits`` bits per element."""
        return packed_bytes(numel, self.bits)

    def write(self, levels: Tensor, out: Tensor) -> None:
        """Pack ``levels`` (int8, used as work space): 8 bits as they are, fewer from 0 upwards."""
        if self.bits < 8:
            levels.add_(self.levels)
        pack(levels.view(torch.uint8), self.bits, out)

    def read(self, data: Tensor, out: Tensor) -> None:
        """Unpack into ``out`` (int8)."""
        unpack(data, self.bits, out.view(torch.uint8))
        if self.bits < 8:
            out.sub_(self.levels)


class QSGD(_Uniform):
    r"""Uniform levels between plus and minus the largest magnitude of a block, rounded at random.

    .. math:: C(x)_i = h \lfloor x_i / h + u_i \rfloor, \quad h = \max_j |x_j| / s, \quad s = 2^{b-1} - 1

    with :math:`u_i` uniform in [0, 1), so that the expectation is x. The paper scales a block by its Euclidean norm;
    the maximum makes the error of 512 entries about seven times smaller at the same bits. The draws have 15 bits, so
    probabilities are exact to 2 ** -16.

    Args:
        bits: Bits per entry with its sign, 2 to 8.
        block: Entries that share a scale, a multiple of 8.
        stochastic: False rounds to the nearest level: biased, but a contraction, as error feedback needs.
        seed: Seed of the draws.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding".

    Example:
        >>> codec = QSGD(bits=4)
        >>> codec.payload_bytes(1024)  # two scales and half a byte per entry
        520
        >>> codec.decompress(codec.compress(torch.tensor([7.0, -3.0, 0.0])))
        tensor([ 7., -3.,  0.])
    """

    def __init__(self, bits: int = 4, *, block: int = 512, stochastic: bool = True, seed: int = 0) -> None:
        super().__init__(block=block, stochastic=stochastic, seed=seed)
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise UsageError(f"bits={bits!r} must be a whole number from 2 to 8; for one bit use Sign")
        self.bits = bits
        self.levels = 2 ** (bits - 1) - 1

    def contractive(self) -> Compressor:
        """Return the same levels without the draws."""
        return QSGD(self.bits, block=self.block, stochastic=False, seed=self.seed)


class Int8(_Uniform):
    """The nearest of 255 levels: ``QSGD(bits=8, stochastic=False)`` under its usual name.

    Args:
        block: Entries that share a scale, a multiple of 8.

    Raises:
        UsageError: If ``block`` is out of range.

    Example:
        >>> Int8().payload_bytes(1024)
        1032
    """

    bits, levels = 8, 127

    def __init__(self, block: int = 512) -> None:
        super().__init__(block=block, stochastic=False, seed=0)


class TernGrad(_Uniform):
    r"""Three levels :math:`-N, 0, N` with N the largest magnitude of the block; five entries in a byte.

    .. math:: C(x)_i = N \,\mathrm{sign}(x_i)\, b_i, \qquad P(b_i = 1) = |x_i| / N

    The paper has one scale per layer and clips entries at 2.5 standard deviations first, which brings the error down
    and a bias in; blocks need it less.

    Args:
        block: Entries that share a scale, a multiple of 8.
        clip: Clip at this many times the root mean square of the block, 2.5 in the paper; None for unbiased.
        stochastic: False rounds to the nearest of the three.
        seed: Seed of the draws.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning".

    Example:
        >>> TernGrad().payload_bytes(1000)  # two scales, 200 bytes of codes
        208
    """

    bits, levels = 2, 1

    def __init__(self, *, block: int = 512, clip: Number | None = None, stochastic: bool = True, seed: int = 0) -> None:
        super().__init__(block=block, stochastic=stochastic, seed=seed)
        self.clip = None if clip is None else parse_number(clip, "clip")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise UsageError(f"clip={clip!r} must be a positive multiple of the root mean square, or None")
        self.clips = self.clip is not None
        self.unbiased = stochastic and not self.clips

    def delta(self, numel: int) -> float | None:
        """Return the constant of nearest levels; None with ``clip``, which may cut off almost all of an outlier."""
        return None if self.clips else super().delta(numel)

    def contractive(self) -> Compressor:
        """Return the same levels without draws and clipping."""
        return TernGrad(block=self.block, stochastic=False, seed=self.seed)

    def block_scale(self, blocks: Tensor, numel: int, scales: Tensor) -> None:
        """Write the maximum, or the clipping value if that is smaller."""
        super().block_scale(blocks, numel, scales)
        if self.clip is not None:
            mean_square = torch.linalg.vector_norm(blocks, dim=1).square_() / block_sizes(blocks, numel)
            torch.minimum(scales, mean_square.sqrt_().mul_(self.clip), out=scales)

    def fill(self, known: Tensor) -> Tensor | None:
        """Return the root mean square if the clipping value depends on it."""
        return known.square().mean().sqrt() if self.clips else None

    def code_bytes(self, numel: int) -> int:
        """Return a byte for five elements."""
        return trit_bytes(numel)

    def write(self, levels: Tensor, out: Tensor) -> None:
        """Pack ``levels`` (int8, used as work space)."""
        pack_trits(levels.add_(1).view(torch.uint8), out)

    def read(self, data: Tensor, out: Tensor) -> None:
        """Unpack into ``out`` (int8)."""
        unpack_trits(data, out.view(torch.uint8))
        out.sub_(1)
