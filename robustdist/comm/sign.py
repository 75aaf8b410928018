"""One bit per entry."""

from __future__ import annotations

import torch
from torch import Tensor

from robustdist.comm.bitpack import pack, packed_bytes, unpack
from robustdist.comm.blocks import BlockCodec, block_sizes, mark_bad_blocks
from robustdist.comm.scratch import scratch

__all__ = ["Sign"]


class Sign(BlockCodec):
    r"""The sign bit of every entry, times the mean magnitude of its block.

    .. math:: C(x)_i = \pm\frac{1}{B} \sum_j |x_j|

    A zero counts as positive, and minus zero as negative: where a block is not zero altogether, its zeros come out as
    plus or minus the scale. Use it with error feedback.

    Args:
        block: Entries that share a scale, a multiple of 8.

    Raises:
        UsageError: If ``block`` is out of range.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes".
        Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems".

    Example:
        >>> Sign().decompress(Sign().compress(torch.tensor([3.0, -1.0])))
        tensor([ 2., -2.])
    """

    def __init__(self, block: int = 512) -> None:
        super().__init__(block=block)

    def delta(self, numel: int) -> float:
        r"""Return 1/B, reached by one entry among zeros; :math:`\|x\|_1^2 / (B \|x\|_2^2)`, 2/pi for Gaussian ones."""
        return 1 / max(min(self.block, numel), 1)

    def fill(self, known: Tensor) -> Tensor:
        """Return the mean magnitude."""
        return known.abs().mean()

    def code_bytes(self, numel: int) -> int:
        """Return a byte for eight elements."""
        return packed_bytes(numel, 1)

    def encode_blocks(
        self, blocks: Tensor, numel: int, scales: Tensor, out: Tensor, generator: torch.Generator | None
    ) -> None:
        """Average magnitudes, pack sign bits."""
        work = scratch("places", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
        torch.sum(torch.abs(blocks, out=work), 1, out=scales)
        scales.div_(block_sizes(blocks, numel))
        mark_bad_blocks(scales)
        bits = work.view(torch.int32)
        torch.bitwise_right_shift(blocks.view(torch.int32), 31, out=bits)
        codes = scratch("codes", blocks.numel(), torch.int8, blocks.device)
        codes.copy_(bits.view(-1)).bitwise_and_(1)
        pack(codes[:numel].view(torch.uint8), 1, out)

    def decode_blocks(self, scales: Tensor, codes: Tensor, numel: int, out: Tensor) -> None:
        """Multiply 1 or -1 by the scale."""
        signs = scratch("codes", out.numel(), torch.int8, out.device)
        unpack(codes, 1, signs[:numel].view(torch.uint8))
        out.view(-1).copy_(signs.mul_(-2).add_(1))
        out.mul_(scales[:, None])
