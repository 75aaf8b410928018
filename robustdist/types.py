"""Names shared by all packages: norms, bounds, numbers as people write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from torch import Tensor

from robustdist.errors import UsageError

__all__ = ["NORMS", "UNLABELED", "AttackLoss", "Bounds", "Norm", "Number", "check_count", "parse_number"]

Norm: TypeAlias = Literal["linf", "l2", "l1"]
NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")

#: The integer target that marks a sample without label.
UNLABELED = -1

#: Smallest and largest valid pixel, or None for inputs without a box.
Bounds: TypeAlias = Sequence[float] | None

#: A number, or a fraction written as people write radii: ``"8/255"``.
Number: TypeAlias = float | int | str

#: ``attack_loss(logits, target)``: one value per sample, or a scalar summed over the batch.
AttackLoss: TypeAlias = Callable[[Tensor, Any], Tensor]


def parse_number(value: Number, option: str) -> float:
    """Return ``value`` as a float; fractions such as ``"8/255"`` are evaluated exactly.

    Args:
        value: A number or a string holding a number or a fraction.
        option: Name of the option, for the message.

    Raises:
        UsageError: If ``value`` is not a number.

    Example:
        >>> parse_number("8/255", "eps") == 8 / 255
        True
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        if not isinstance(value, str):
            return float(value)
        numerator, denominator, *more = [Fraction(part) for part in value.split("/")] + [Fraction(1)]
        if len(more) > 1:
            raise ValueError
        return float(numerator / denominator)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"{option}={value!r} is not a number: write a decimal or a fraction such as 8/255") from None


def check_count(value: int, option: str) -> int:
    """Return ``value`` if it is a whole number of at least 1.

    Raises:
        UsageError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{option}={value!r} must be a whole number of at least 1")
    return value
