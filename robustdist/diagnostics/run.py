"""Evaluate and examine in one call, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.diagnostics.examine import Diagnosis, examine
from robustdist.diagnostics.subset import Part, Subset
from robustdist.diagnostics.threat import compared
from robustdist.evaluation.findings import CHECKS
from robustdist.evaluation.identity import model_hash
from robustdist.evaluation.tally import RobustTally
from robustdist.report.result import Check, EvaluationResult
from robustdist.types import check_count

__all__ = ["diagnose", "with_diagnosis"]


def diagnose(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    attacks: Mapping[str, Attack],
    *,
    forward: Callable[[Tensor], Any] | None = None,
    surrogate: nn.Module | None = None,
    check_samples: int = 200,
    batch_size: int = 128,
) -> EvaluationResult:
    """Evaluate ``module`` on all images and examine the evaluation on some of them.

    Args:
        module: The module to judge; it stays as it was.
        x: Inputs, shape (n, ...).
        y: Class indices, shape (n,).
        attacks: Attacks by name.
        forward: Maps inputs to logits; default ``module``.
        surrogate: For the transfer check, a module that maps inputs to logits; default a small net that learns the
            model's answers.
        check_samples: Images that the evaluation is examined on, spread evenly.
        batch_size: Images per forward and backward pass.

    Returns:
        Counts, all checks and the curves.

    Raises:
        UsageError: If images, targets or attacks do not fit.

    Example:
        >>> from robustdist.attacks import PGD
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        >>> x = torch.rand(8, 1, 8, 8)
        >>> result = diagnose(net, x, net(x).argmax(1), {"pgd": PGD(eps=0.1, steps=5)})
        >>> result.checks["budget"].passed, len(result.checks)
        (True, 13)
    """
    check_count(check_samples, "check_samples")
    function = module if forward is None else forward
    tally = RobustTally(attacks)
    for rows in _batches(len(x), check_count(batch_size, "batch_size")):
        chosen = rows.to(x.device)
        tally.update(module, function, x[chosen], y[chosen], rows.tolist())
    tally.reduce(_alone)
    kept = torch.arange(0, len(x), max(1, len(x) // check_samples))[:check_samples]
    chosen = kept.to(x.device)
    part = Part(
        forward=function,
        x=x[chosen].detach().clone(),
        y=y[chosen].clone(),
        ids=kept.tolist(),
        held=tally.records.robust_under(compared(attacks))[kept],
        own=torch.ones(len(kept), dtype=torch.bool),
    )
    diagnosis = examine(Subset(module, [part], batch_size), attacks, _alone, surrogate)
    return replace(with_diagnosis(tally.result(), diagnosis), model_hash=model_hash(module))


def with_diagnosis(result: EvaluationResult, diagnosis: Diagnosis) -> EvaluationResult:
    """Return ``result`` with what the examination found; a check that both made fails if one of them does."""
    checks = dict(result.checks)
    for name, found in diagnosis.checks.items():
        cheap = checks.get(name)
        if cheap is None:
            checks[name] = found
        elif cheap.passed is not False:
            passed = cheap.passed if found.passed is None else found.passed
            checks[name] = Check(passed, f"{cheap.detail}; {found.detail}")
        else:
            checks[name] = Check(False, f"{cheap.detail}; {found.detail}")
    ordered = {name: checks[name] for name in CHECKS if name in checks}
    return replace(result, checks=ordered | checks, curves=diagnosis.curves)


def _batches(count: int, size: int) -> list[Tensor]:
    return [torch.arange(start, min(start + size, count)) for start in range(0, count, size)]


def _alone(value: Any) -> list[Any]:
    return [value]
