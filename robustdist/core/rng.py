"""Randomness that depends on (seed, rank, step) or on (seed, sample), never on global generators."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Noise", "derive_seed"]


def derive_seed(*key: int | str) -> int:
    """Mix integers and words into one 63-bit seed; different keys give unrelated seeds.

    Example:
        >>> derive_seed(0, 1) != derive_seed(1, 0)
        True
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in key:
        kind, encoded = (b"s", part.encode()) if isinstance(part, str) else (b"i", struct.pack("<q", part))
        digest.update(kind + struct.pack("<q", len(encoded)) + encoded)
    return int(struct.unpack("<Q", digest.digest())[0]) >> 1


@dataclass(frozen=True)
class Noise:
    """Draws for one attack call.

    With ``sample_ids`` every row has a stream of its own, keyed by (seed, id): the draws do not depend on the batch
    size, on the order of the rows or on the number of processes. Otherwise one stream keyed by (seed, rank, step)
    fills the whole batch.

    Args:
        seed: Seed of the attack.
        rank: Global rank of the process.
        step: Number of the attack call in this run.
        sample_ids: One integer per row, or None.
    """

    seed: int
    rank: int = 0
    step: int = 0
    sample_ids: Sequence[int] | None = None

    def uniform(self, like: Tensor, *tag: int | str) -> Tensor:
        """Uniform draws in [0, 1) with the shape, dtype and device of ``like``; ``tag`` names the purpose."""
        return self._fill(like, lambda out, generator: out.uniform_(generator=generator), tag)

    def normal(self, like: Tensor, *tag: int | str) -> Tensor:
        """Standard normal draws with the shape, dtype and device of ``like``; ``tag`` names the purpose."""
        return self._fill(like, lambda out, generator: out.normal_(generator=generator), tag)

    def integers(self, like: Tensor, high: int, *tag: int | str) -> Tensor:
        """Integer draws in [0, high) with the shape, dtype and device of ``like``; ``tag`` names the purpose."""
        return self._fill(like, lambda out, generator: out.random_(0, high, generator=generator), tag)

    def _fill(
        self, like: Tensor, draw: Callable[[Tensor, torch.Generator], Tensor], tag: tuple[int | str, ...]
    ) -> Tensor:
        if self.sample_ids is None:
            generator = torch.Generator(like.device)
            generator.manual_seed(derive_seed(self.seed, "step", self.rank, self.step, *tag))
            return draw(torch.empty_like(like), generator)
        # Row by row on the CPU: a device generator would be re-seeded once per row, and its stream differs per device.
        rows = torch.empty(like.shape, dtype=like.dtype)
        generator = torch.Generator()
        for row, sample_id in zip(rows, self.sample_ids, strict=True):
            generator.manual_seed(derive_seed(self.seed, "sample", int(sample_id), *tag))
            draw(row, generator)
        return rows.to(like.device)
