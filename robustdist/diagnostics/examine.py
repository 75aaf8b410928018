"""Examine an evaluation with attacks of its own: curves, and the checks that need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.diagnostics import checks
from robustdist.diagnostics.subset import Subset
from robustdist.diagnostics.surrogate import distilled
from robustdist.diagnostics.threat import Threat
from robustdist.evaluation.findings import CHECKS
from robustdist.report.result import Check, CurvePoint
from robustdist.report.text import eps_text

__all__ = ["THOROUGH", "Diagnosis", "examine", "not_run"]

#: Checks that need attacks of their own, or sharpen a cheap one.
THOROUGH = ("gradient", "one_step", "larger_radius", "more_steps", "black_box", "transfer")

_STEPS = (1, 2, 5, 10, 20, 50)
_RESTARTS = (1, 2, 5)
_QUERIES = 500
# Steps of the attacks behind the curves of radii and restarts.
_CURVE_STEPS = 20


@dataclass
class Diagnosis:
    """What the examination found: checks by name, and accuracy against "eps", "steps" and "restarts"."""

    checks: dict[str, Check] = field(default_factory=dict)
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)


def not_run(reason: str) -> dict[str, Check]:
    """Return all checks of this file as not run."""
    return {name: Check(None, reason) for name in THOROUGH if name in CHECKS[8:]}


def examine(
    subset: Subset,
    attacks: Mapping[str, Attack],
    gather: Callable[[Any], list[Any]],
    surrogate: nn.Module | None = None,
) -> Diagnosis:
    """Run the attacks and judge.

    Args:
        subset: The images of this process.
        attacks: The attacks of the evaluation, which are examined.
        gather: Returns the value of every process; a collective, entered by each before its attacks and after them.
        surrogate: Maps the same inputs to logits; default a small net that learns the model's answers.
    """
    threat = Threat.of(attacks)
    if threat is None:
        return Diagnosis(not_run("no attack of the evaluation has a radius"))
    images = [part.x for part in subset.parts if len(part.x)]
    spans = gather((images[0][0].numel() if images else 0, *threat.span(images)))
    size = max(size for size, *_ in spans)
    if size == 0:
        return Diagnosis(not_run("there was no image"))
    radii = threat.radii(size, min(low for _, low, _ in spans), max(high for *_, high in spans))
    everyone = [columns for columns in gather(_measure(subset, threat, radii, surrogate) if images else {}) if columns]
    joined = {name: torch.cat([columns[name] for columns in everyone]) for name in everyone[0]}
    return _judge(joined, threat, radii)


def _measure(subset: Subset, threat: Threat, radii: list[float], surrogate: nn.Module | None) -> dict[str, Tensor]:
    """Return verdicts by name of the measurement, one entry per own image."""
    columns = {
        "clean": subset.own(subset.clean),
        "held": subset.own([part.held for part in subset.parts]),
        "no margin gradient": subset.without_gradient(threat.descent(1, loss="margin")),
        "no ce gradient": subset.without_gradient(threat.descent(1, loss="ce")),
        "one step": subset.verdicts(threat.one_step()),
        "margin": subset.verdicts(threat.descent(max(_STEPS), restart=0, loss="margin")),
    }
    for steps in _STEPS:
        columns[f"steps {steps}"] = subset.verdicts(threat.descent(steps))
    for place, eps in enumerate(radii):
        known = columns.get(f"steps {_CURVE_STEPS}") if eps == threat.eps else None
        columns[f"eps {place}"] = subset.verdicts(threat.descent(_CURVE_STEPS, eps=eps)) if known is None else known
    standing = columns["clean"]
    for restart in range(max(_RESTARTS)):
        standing = subset.verdicts(threat.descent(_CURVE_STEPS, restart=restart), among=standing)
        if restart + 1 in _RESTARTS:
            columns[f"restarts {restart + 1}"] = standing
    if threat.has_random_search(subset.parts[0].x):
        columns["black box"] = subset.verdicts(threat.random_search(_QUERIES))
    substitute = distilled(subset, threat) if surrogate is None else surrogate.to(subset.parts[0].x.device)
    columns["transfer"] = subset.verdicts(threat.descent(_CURVE_STEPS, loss="margin"), victim=substitute)
    return columns


def _judge(columns: Mapping[str, Tensor], threat: Threat, radii: list[float]) -> Diagnosis:
    by_eps = [(0.0, columns["clean"]), *((eps, columns[f"eps {place}"]) for place, eps in enumerate(radii))]
    by_steps = [(steps, columns[f"steps {steps}"]) for steps in _STEPS]
    by_restarts = [(count, columns[f"restarts {count}"]) for count in _RESTARTS]
    most_steps, most_restarts = by_steps[-1][1], by_restarts[-1][1]
    strongest = columns["held"] & most_steps & most_restarts
    # the evaluation counts here only if all of its attacks follow gradients: black boxes among them are no reference
    with_gradients = strongest if threat.follows_gradients else most_steps & most_restarts
    white_box = with_gradients & columns["margin"]
    counts = [int(columns[name].sum()) for name in ("clean", "no margin gradient", "no ce gradient")]
    if counts[0] == 0:
        return Diagnosis(not_run("no image is right without attack"))
    found = {
        "gradient": checks.gradient(*counts),
        "one_step": checks.one_step(columns["clean"], columns["one step"], most_steps, max(_STEPS)),
        "larger_radius": checks.larger_radius(by_eps),
        "more_steps": checks.more_steps(by_steps, columns["held"], strongest),
        "black_box": checks.no_better("random search (Square)", columns["black box"], columns["held"], white_box)
        if "black box" in columns
        else Check(None, "random search knows images under linf and l2 only"),
        "transfer": checks.no_better("transfer from a substitute", columns["transfer"], columns["held"], white_box),
    }
    if threat.left_out:
        about = (
            f" (about {threat.reference.norm} radius {eps_text(threat.eps)}; left out, being about another: "
            f"{', '.join(threat.left_out)})"
        )
        found = {name: Check(check.passed, check.detail + about) for name, check in found.items()}
    curves: dict[str, Sequence[tuple[float, Tensor]]] = {"eps": by_eps, "steps": by_steps, "restarts": by_restarts}
    return Diagnosis(
        found,
        {
            name: [CurvePoint(float(value), int(right.sum()), len(right)) for value, right in curve]
            for name, curve in curves.items()
        },
    )
