"""A result as the row of a leaderboard, in the fields of RobustBench."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from robustdist.errors import UsageError
from robustdist.report.result import EvaluationResult
from robustdist.report.text import standard_autoattacks

__all__ = ["FIELDS", "checked_row", "leaderboard_row", "radius_string"]

#: The fields of a row, in the order of the board.
FIELDS = (
    "name", "authors", "link", "venue", "architecture", "dataset", "eps", "additional_data", "number_forward_passes",
    "clean_acc", "reported", "autoattack_acc", "footnote", "unreliable",
)  # fmt: skip
_MEASURED = ("eps", "clean_acc", "autoattack_acc", "unreliable")


def checked_row(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a user may give.

    Raises:
        UsageError: If a field does not exist, or is measured.
    """
    for name in known:
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, n=1)
            raise UsageError(
                f"leaderboard has no field {name!r}: "
                + (f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(FIELDS)}")
            )
        if name in _MEASURED:
            raise UsageError(f"leaderboard.{name} is measured, not given: leave it out")
    return dict(known)


def radius_string(eps: float) -> str:
    """Return a radius exactly: as a number of 255ths where it is one, otherwise as the shortest equal decimal.

    Example:
        >>> radius_string(8 / 255), radius_string(0.031), radius_string(0.5)
        ('8/255', '0.031', '0.5')
    """
    levels = round(eps * 255 * 4) / 4
    if eps > 0 and math.isfinite(eps) and len(repr(eps)) > 8 and levels / 255 == eps:
        return f"{levels:g}/255"
    return repr(eps)


def leaderboard_row(
    result: EvaluationResult, known: Mapping[str, Any] = MappingProxyType({}), architecture: str | None = None
) -> dict[str, Any]:
    """Return the row; what cannot be known is None.

    Accuracies are strings in percent with two decimals, as on the board. ``autoattack_acc`` is there only if
    AutoAttack ran in its standard version as published. ``unreliable`` is True if a check failed, False if all were
    run and passed, and None, not known, if one of them was not run or could not be.

    Args:
        result: The evaluation.
        known: Fields that only the user knows.
        architecture: Name of the model's class, unless the user gave one.
    """
    standard = standard_autoattacks(result)
    eps = result.threat_model.get("eps")
    row = dict.fromkeys(FIELDS) | {"architecture": architecture} | dict(known)
    return row | {
        "eps": radius_string(float(eps)) if isinstance(eps, (int, float)) else None,
        "clean_acc": f"{100 * result.clean_acc:.2f}",
        "autoattack_acc": f"{100 * result.attack_acc(standard[0]):.2f}" if standard else None,
        "unreliable": True if result.failed_checks else None if result.unchecked else False,
    }
