"""The rows of ``robustdist bench comm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from robustdist.comm import Compressor, PowerSGD, make_compressor
from robustdist.errors import UsageError

__all__ = ["HOOK_RANK", "PLAIN", "ROWS", "SMALL", "Row", "chosen_rows", "gradient_shapes", "low_rank_numbers"]

_WIDTH = 1000

#: Key of the row that ratios are to.
PLAIN = "fp32"

#: Tensors with fewer elements are not compressed by the engine.
SMALL = 1024

#: Rank of torch's PowerSGD hook.
HOOK_RANK = 4


@dataclass(frozen=True)
class Row:
    """How gradients are averaged.

    Attributes:
        kind: "plain" is DDP's own all-reduce, "fp16" and "powersgd" are torch's hooks, "engine" is this package.
        compressor: Name of the codec, for "engine".
        settings: Its arguments.
        error_feedback: Whether the engine keeps residuals.
        one_bucket: Whether all gradients are one bucket.
        may_hang: Whether the row is measured apart from the others.
    """

    name: str
    kind: Literal["plain", "fp16", "powersgd", "engine"] = "engine"
    compressor: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    error_feedback: bool = True
    one_bucket: bool = False
    may_hang: bool = False

    def codec(self) -> Compressor:
        """Return a new codec."""
        return make_compressor(self.compressor, **self.settings)


ROWS = {
    PLAIN: Row("fp32 all-reduce", "plain"),
    "torch_fp16": Row("torch: fp16 hook", "fp16"),
    "torch_powersgd": Row("torch: PowerSGD hook, rank 4", "powersgd", may_hang=True),
    "torch_powersgd_one_bucket": Row("torch: PowerSGD hook, one bucket", "powersgd", one_bucket=True, may_hang=True),
    "identity": Row("Identity", compressor="identity"),
    "bf16": Row("BF16", compressor="bf16"),
    "int8": Row("Int8", compressor="int8"),
    "natural": Row("Natural", compressor="natural"),
    "qsgd4": Row("QSGD(4)", compressor="qsgd", settings={"bits": 4}),
    "qsgd4_random": Row(
        "QSGD(4), random, no residual", compressor="qsgd", settings={"bits": 4}, error_feedback=False
    ),
    "qsgd2": Row("QSGD(2)", compressor="qsgd", settings={"bits": 2}),
    "terngrad": Row("TernGrad", compressor="terngrad"),
    "sign": Row("Sign", compressor="sign"),
    "topk": Row("TopK(0.01)", compressor="topk", settings={"ratio": 0.01}),
    "powersgd": Row("PowerSGD(4)", compressor="powersgd", settings={"rank": 4}),
}  # fmt: skip


def gradient_shapes(numel: int) -> list[tuple[int, ...]]:
    """Return the shapes of ``numel`` gradients: matrices of 1000 x 1000, one with fewer rows, and what is left over.

    Example:
        >>> gradient_shapes(1_002_003)
        [(1000, 1000), (2, 1000), (3,)]
    """
    rows, rest = divmod(numel, _WIDTH)
    matrices = [(min(_WIDTH, rows - row), _WIDTH) for row in range(0, rows, _WIDTH)]
    return [*matrices, *([(rest,)] if rest else [])]


def low_rank_numbers(codec: PowerSGD | None, shape: Sequence[int]) -> int:
    """Return how many numbers PowerSGD all-reduces for a gradient: those of P and Q, or the gradient as it is.

    Args:
        codec: This package's; None for torch's hook, which asks for half of the numbers or less, and takes no vectors.
        shape: Shape of the gradient.

    Example:
        >>> [low_rank_numbers(PowerSGD(rank=4), shape) for shape in ((1000, 1000), (1000,))]
        [8000, 1000]
        >>> [low_rank_numbers(None, shape) for shape in ((1000, 1000), (9, 1000), (2000,))]
        [8000, 4036, 2000]
        >>> low_rank_numbers(None, (8, 1000))
        8000
    """
    numel = prod(shape)
    if codec is not None:
        return codec.payload_bytes(shape) // 4 if numel >= SMALL else numel
    rows, columns = shape[0], numel // shape[0]
    factors = min(rows, columns, HOOK_RANK) * (rows + columns)
    return factors if 2 * factors < numel else numel


def chosen_rows(rows: Sequence[str] | None) -> list[str]:
    """Return keys of rows, each once, the reference first.

    Raises:
        UsageError: If one is unknown or there is none.
    """
    keys = list(dict.fromkeys(ROWS if rows is None else rows))
    unknown = [key for key in keys if key not in ROWS]
    if unknown or not keys:
        raise UsageError(f"rows={unknown} are unknown: choose some of {', '.join(ROWS)}")
    return [PLAIN, *(key for key in keys if key != PLAIN)]
