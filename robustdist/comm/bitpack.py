"""Packing small codes into bytes, a strip at a time so that every operation runs over long contiguous rows."""

from __future__ import annotations

import torch
from torch import Tensor

from robustdist.comm.scratch import scratch

__all__ = ["pack", "pack_trits", "packed_bytes", "trit_bytes", "unpack", "unpack_trits"]

# A code of b bits is cut into fields whose widths divide 8: 7 = 4 + 2 + 1.
_WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}

_TRITS = 5  # 3 ** 5 = 243 fits a byte


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes that :func:`pack` writes: the bits of every field of all codes, rounded up to whole bytes.

    Example:
        >>> packed_bytes(1000, 4), packed_bytes(9, 1), packed_bytes(9, 3)
        (500, 2, 5)
    """
    return sum(-(-numel * width // 8) for width in _WIDTHS[bits])


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    r"""Write codes of ``bits`` bits into ``out`` without gaps.

    A field of :math:`w` bits (w divides 8) goes into :math:`m = \lceil nw/8 \rceil` bytes; byte j holds the fields of
    codes j, j + m, j + 2m, ... from its lowest bits upwards. Missing codes at the end count as 0.

    Args:
        codes: Shape (n,), uint8, each below ``2 ** bits``.
        bits: Bits per code, 1 to 8.
        out: Shape (packed_bytes(n, bits),), uint8; overwritten.
    """
    shift = start = 0
    for width in _WIDTHS[bits]:
        count = -(-len(codes) * width // 8)
        field = codes
        if width != bits:
            field = scratch("pack.field", len(codes), torch.uint8, codes.device)
            torch.bitwise_right_shift(codes, shift, out=field)
            field.bitwise_and_((1 << width) - 1)
        _pack_field(field, width, out[start : start + count])
        shift, start = shift + width, start + count


def unpack(data: Tensor, bits: int, out: Tensor) -> None:
    """Read codes written by :func:`pack`.

    Args:
        data: Shape (packed_bytes(n, bits),), uint8.
        bits: Bits per code, 1 to 8.
        out: Shape (n,), uint8; overwritten.
    """
    shift = start = 0
    for width in _WIDTHS[bits]:
        count = -(-len(out) * width // 8)
        source = data[start : start + count]
        if width == bits:
            _unpack_field(source, width, out)
        else:
            field = scratch("unpack.field", len(out), torch.uint8, out.device)
            _unpack_field(source, width, field)
            if shift:
                out.add_(field, alpha=1 << shift)
            else:
                out.copy_(field)
        shift, start = shift + width, start + count


def trit_bytes(numel: int) -> int:
    """Bytes that :func:`pack_trits` writes: one for five codes.

    Example:
        >>> trit_bytes(11)
        3
    """
    return -(-numel // _TRITS)


def pack_trits(codes: Tensor, out: Tensor) -> None:
    r"""Write codes 0, 1, 2, five to a byte (1.6 bits each): byte j is :math:`\sum_k 3^k c_{j + km}`.

    Args:
        codes: Shape (n,), uint8, each 0, 1 or 2.
        out: Shape (m,) = (trit_bytes(n),), uint8; overwritten.
    """
    strips = _strips(codes, _TRITS, len(out))
    out.copy_(strips[-1])
    for strip in reversed(strips[:-1].unbind()):
        torch.add(strip, out, alpha=3, out=out)


def unpack_trits(data: Tensor, out: Tensor) -> None:
    """Read codes written by :func:`pack_trits`.

    Args:
        data: Shape (trit_bytes(n),), uint8.
        out: Shape (n,), uint8; overwritten.
    """
    whole = len(data) * _TRITS
    target = out if whole == len(out) else scratch("unpack.strips", whole, torch.uint8, out.device)
    rest = scratch("unpack.rest", len(data), torch.int16, out.device).copy_(data)
    third = scratch("unpack.third", len(data), torch.int16, out.device)
    for strip in target.view(_TRITS, -1)[:-1].unbind():
        # (85 x + 85) // 256 is x // 3 for every byte, and stays inside 16 bits
        torch.mul(rest, 85, out=third).add_(85).bitwise_right_shift_(8)
        strip.copy_(rest.sub_(third, alpha=3))
        rest, third = third, rest
    target.view(_TRITS, -1)[-1].copy_(rest)
    if target is not out:
        out.copy_(target[: len(out)])


def _pack_field(field: Tensor, width: int, out: Tensor) -> None:
    if width == 8:
        out.copy_(field)
        return
    strips = _strips(field, 8 // width, len(out))
    if len(strips) == 2:
        torch.add(strips[0], strips[1], alpha=16, out=out)
        return
    shifted = scratch("pack.shifted", strips.numel(), torch.uint8, field.device).view_as(strips)
    torch.bitwise_left_shift(strips, _shifts(width, field.device), out=shifted)
    torch.sum(shifted, 0, dtype=torch.uint8, out=out)  # the fields are disjoint: a sum is a bitwise or


def _unpack_field(data: Tensor, width: int, out: Tensor) -> None:
    if width == 8:
        out.copy_(data)
        return
    whole = len(data) * (8 // width)
    target = out if whole == len(out) else scratch("unpack.strips", whole, torch.uint8, out.device)
    torch.bitwise_right_shift(data[None], _shifts(width, out.device), out=target.view(8 // width, -1))
    target.bitwise_and_((1 << width) - 1)
    if target is not out:
        out.copy_(target[: len(out)])


def _strips(codes: Tensor, count: int, length: int) -> Tensor:
    """View codes as ``count`` rows of ``length``, padded with zeros when they do not fill them."""
    if len(codes) < count * length:
        padded = scratch("pack.strips", count * length, torch.uint8, codes.device)
        padded[: len(codes)].copy_(codes)
        padded[len(codes) :].zero_()
        codes = padded
    return codes.view(count, length)


def _shifts(width: int, device: torch.device) -> Tensor:
    """Shape (8 / width, 1): the shift of each strip."""
    count = 8 // width
    return (torch.arange(count, dtype=torch.uint8, device=device) * width)[:, None]
