"""Which parameters of a bucket have a gradient on any rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from robustdist.comm.bitpack import pack, packed_bytes, unpack
from robustdist.comm.scratch import TILE

__all__ = ["has_entries", "used_anywhere"]

#: Entries looked at first: where there is a gradient at all, they nearly always tell.
_HEAD = 1024


def used_anywhere(
    grads: Mapping[str, Tensor], either: Callable[[Tensor], None], known: Collection[str] | None = None
) -> tuple[bytes, dict[str, Tensor]]:
    """Agree on the gradients that are there on any rank, by one bit each.

    Args:
        grads: By name, the same names in the same order on all ranks.
        either: Replaces a tensor of uint8 by its bitwise OR over the ranks.
        known: Names of those that are there on this rank; None for those that have an entry other than zero.

    Returns:
        The bits, equal on all ranks, and the gradients that are used; one with a NaN is.
    """
    own = [has_entries(grad) if known is None else name in known for name, grad in grads.items()]
    flags = torch.tensor(own, dtype=torch.uint8)
    bits = torch.empty(packed_bytes(len(flags), 1), dtype=torch.uint8)
    pack(flags, 1, bits)
    either(bits)
    unpack(bits, 1, flags)
    used = {name: grad for (name, grad), flag in zip(grads.items(), flags.tolist(), strict=True) if flag}
    return bytes(bits.tolist()), used


def has_entries(x: Tensor) -> bool:
    """Whether any entry differs from zero, without a look at the rest once one is found."""
    flat = x.reshape(-1)
    return bool(flat[:_HEAD].any()) or any(bool(part.any()) for part in torch.split(flat[_HEAD:], TILE))
