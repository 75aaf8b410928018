"""The table of codecs: a row each, with what is expected of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from robustdist.comm import (
    BF16,
    DGC,
    EF21,
    FP8,
    FP16,
    QSGD,
    Compressor,
    Identity,
    Int8,
    Natural,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)


@dataclass(frozen=True)
class Row:
    """One codec under test.

    ``bytes`` is the size of the payload of n float32 elements, written down here and not read from the codec.
    ``error`` bounds the relative error of a Gaussian vector. ``region`` is how far a non-finite entry may reach: a
    number of elements, or None for the whole tensor.
    """

    id: str
    make: Callable[..., Compressor]
    bytes: Callable[[int], int]
    error: float
    region: int | None = 512
    draws: bool = False
    ranks_alike: bool = False


def up(n: int, per: int) -> int:
    return -(-n // per)


def scaled(*widths: int) -> Callable[[int], int]:
    """A scale for 512 entries, and the fields of the codes."""
    return lambda n: 4 * up(n, 512) + sum(up(n * width, 8) for width in widths)


def top(n: int, ratio: float) -> int:
    return min(n, max(1, up(round(n * ratio * 1e6), 10**6)))


def tiles(n: int) -> list[int]:
    """The pieces of 128 Ki elements."""
    return [min(131072, n - begin) for begin in range(0, n, 131072)]


def square(n: int, rank: int) -> int:
    side = math.ceil(math.sqrt(n))
    numbers = min(rank, up(n, max(side, 1))) * (side + up(n, max(side, 1)))
    return 4 * min(n, numbers)


ROWS = [
    Row("Identity", Identity, lambda n: 4 * n, 0.0, region=1),
    Row("FP16", FP16, lambda n: 2 * n, 2.5e-4, region=1),
    Row("BF16", BF16, lambda n: 2 * n, 2e-3, region=1),
    Row("FP8-e4m3", FP8, scaled(8), 0.03),
    Row("FP8-e5m2", lambda: FP8("e5m2"), scaled(8), 0.06),
    Row("Int8", Int8, scaled(8), 0.0085),
    Row("Int8-64", lambda: Int8(64), lambda n: 4 * up(n, 64) + n, 0.007, region=64),
    Row("QSGD-8", lambda **k: QSGD(8, **k), scaled(8), 0.012, draws=True),
    Row("QSGD-7", lambda **k: QSGD(7, **k), scaled(4, 2, 1), 0.024, draws=True),
    Row("QSGD-6", lambda **k: QSGD(6, **k), scaled(4, 2), 0.048, draws=True),
    Row("QSGD-5", lambda **k: QSGD(5, **k), scaled(4, 1), 0.1, draws=True),
    Row("QSGD-4", lambda **k: QSGD(4, **k), scaled(4), 0.21, draws=True),
    Row("QSGD-3", lambda **k: QSGD(3, **k), scaled(2, 1), 0.5, draws=True),
    Row("QSGD-2", lambda **k: QSGD(2, **k), scaled(2), 1.4, draws=True),
    Row("QSGD-4-nearest", lambda: QSGD(4, stochastic=False), scaled(4), 0.15),
    Row("TernGrad", TernGrad, lambda n: sum(4 * up(t, 512) + up(up(t, 5), 4 if t == 131072 != n else 1) *
        (4 if t == 131072 != n else 1) for t in tiles(n)), 1.4, draws=True),
    Row("Sign", Sign, scaled(1), 0.62),
    Row("Natural", Natural, scaled(8), 0.3, draws=True),
    Row("Natural-nearest", lambda: Natural(stochastic=False), scaled(8), 0.2),
    Row("TopK", TopK, lambda n: 4 * up(n, 65536) + 6 * top(n, 0.01), 0.97, region=None),
    Row("TopK-fp16", lambda: TopK(0.1, values="fp16"),
        lambda n: 4 * up(n, 65536) + 4 * (n > 0) + 4 * top(n, 0.1), 0.8, region=None),
    Row("RandomK", lambda **k: RandomK(0.1, **k), lambda n: 8 + 4 * sum(top(t, 0.1) for t in tiles(n)), 3.6,
        region=131072, draws=True, ranks_alike=True),
    Row("DGC", lambda: DGC(0.05), lambda n: 4 * up(n, 65536) + 6 * top(n, 0.05), 0.9, region=None),
    Row("PowerSGD", lambda **k: PowerSGD(2, **k), lambda n: square(n, 2), 1.0, region=None),
    Row("EF21", lambda: EF21(Int8()), scaled(8), 0.0085),
]  # fmt: skip


def only(claim: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """Run a test for the rows of which ``claim`` is true."""
    return pytest.mark.parametrize("row", [row for row in ROWS if claim(row)], ids=lambda row: row.id)


LARGE = 2 * 131072 + 77


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def size(codec: Compressor, x: Tensor) -> int:
    return codec.payload_bytes(x.shape if isinstance(codec, PowerSGD) else x.numel(), x.dtype)
