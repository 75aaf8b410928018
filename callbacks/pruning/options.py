"""Options of StructuredPruning that are wrong by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from robustdist._lightning import rank_zero_warn
from robustdist.callbacks.pruning.learning import LEARNED
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning.groups import Kind
from robustdist.pruning.importance import CRITERIA
from robustdist.pruning.selection import Target
from robustdist.types import check_count

__all__ = ["Removal", "check_pruning_options", "looked_for"]

Removal: TypeAlias = Literal["scheduled", "never"]


def check_pruning_options(
    *,
    target: Target,
    method: str,
    kinds: Sequence[Kind],
    ignore: Sequence[str],
    removal: str,
    round_to: int,
    bn_recalibration_batches: int,
    distill: float,
    forward: Any,
) -> None:
    """Check what can be checked without a module.

    Raises:
        UsageError: Naming the option and the remedy.
    """
    if method not in CRITERIA and method not in LEARNED:
        raise UsageError(f"method={method!r} is unknown: use one of {', '.join([*CRITERIA, *LEARNED])}")
    for option, value in (("kinds", kinds), ("ignore", ignore)):
        if isinstance(value, str):
            raise UsageError(f"{option}={value!r} must be a list: write [{value!r}]")
    if not kinds or set(kinds) - set(get_args(Kind)):
        raise UsageError(f"kinds={list(kinds)}: give some of {', '.join(get_args(Kind))}")
    if removal not in get_args(Removal):
        raise UsageError(f"removal={removal!r} is unknown: use {' or '.join(get_args(Removal))}")
    if removal == "never" and "hidden" in kinds:
        rank_zero_warn(
            "removal='never' with hidden: after the fit norms see the masked dimensions again, so the masked module "
            "computes something else than it was trained as: leave removal as it is, or leave out hidden",
            category=RobustDistWarning,
        )
    if "layers" in kinds and "layers" not in target.shape:
        raise UsageError("kinds: layers go by their number: write target={'layers': 4}, for example, or leave them out")
    if "layers" in target.shape and method == "bn_scale":
        others = [name for name in [*CRITERIA, *LEARNED] if name != method]
        raise UsageError(f"method='bn_scale' has no score for target layers: use one of {', '.join(others)}")
    if "layers" in target.shape and removal == "never":
        raise UsageError("removal='never' does not go with target layers, whose masks are no zeros: drop one")
    if removal == "never" and method in LEARNED:
        raise UsageError(f"removal='never' does not go with method={method!r}, whose masks are no zeros: drop one")
    check_count(round_to, "round_to")
    if bn_recalibration_batches < 0:
        raise UsageError(f"bn_recalibration_batches={bn_recalibration_batches} must not be negative: 0 turns it off")
    if distill and not (forward is None or isinstance(forward, str)):
        raise UsageError("distill: forward must be the path of the part that training_step calls, not a function")


def looked_for(kinds: Sequence[Kind], target: Target) -> tuple[Kind, ...]:
    """Return the kinds to look for: layers if ``target`` names them, and only them if it names nothing else."""
    if set(target.shape) == {"layers"}:
        return ("layers",)
    return tuple(dict.fromkeys([*kinds, *(kind for kind in target.shape if kind == "layers")]))
