"""How numbers, threat models and settings are worded, in every kind of report alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from robustdist.report.result import EvaluationResult, wilson_interval

__all__ = [
    "attack_names",
    "bound_text",
    "checks_text",
    "eps_text",
    "exact_text",
    "interval_text",
    "percent",
    "seconds_text",
    "setting_text",
    "short_settings",
    "standard_autoattacks",
    "threat_model_text",
]

# Settings that tell one attack from another at a glance, in this order; the rest is in report.json.
_SHORT = (
    "norm",
    "eps",
    "steps",
    "restarts",
    "version",
    "queries",
    "n_queries",
    "precision",
    "attack_loss",
    "model_mode",
)
# Values that go without saying.
_USUAL = {"norm": "linf", "restarts": 1, "attack_loss": "ce", "model_mode": "eval", "precision": "32"}
_RADII = ("eps", "step_size", "alpha")
_NORM_WORDS = {
    "linf": "each pixel may change by at most {eps} (linf)",
    "l2": "the change may be at most {eps} long over the whole image (l2)",
    "l1": "the changes of all pixels may add up to at most {eps} (l1)",
}


def percent(share: float) -> str:
    """Return a share as percent with one decimal, without the sign.

    Example:
        >>> percent(0.9134)
        '91.3'
    """
    return f"{100 * share:.1f}"


def interval_text(successes: int, trials: int, separator: str = "-") -> str:
    """Return the 95 % interval of a proportion in percent.

    Example:
        >>> interval_text(8, 10)
        '49.0-94.3'
    """
    low, high = wilson_interval(successes, trials)
    return f"{percent(low)}{separator}{percent(high)}"


def seconds_text(seconds: float) -> str:
    """Return seconds with as many digits as matter, "-" when unknown.

    Example:
        >>> seconds_text(2.345), seconds_text(134.6)
        ('2.3', '135')
    """
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.1f}"


def eps_text(eps: Any) -> str:
    """Return a radius as people write it: a short decimal, or a number of 255ths.

    Example:
        >>> eps_text(8 / 255), eps_text(0.3)
        ('8/255', '0.3')
    """
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        return str(eps)
    levels = eps * 255
    short = f"{eps:.3g}"
    if float(short) == eps or not math.isfinite(eps):
        return short
    if eps > 0 and math.isclose(levels * 4, round(levels * 4), rel_tol=1e-6):
        return f"{levels:.4g}/255"
    return f"{eps:.4g}"


def threat_model_text(threat_model: Mapping[str, Any]) -> str:
    """Return the threat model as a phrase.

    Example:
        >>> threat_model_text({"norm": "linf", "eps": 8 / 255, "bounds": (0.0, 1.0)})
        'each pixel may change by at most 8/255 (linf), within [0, 1]'
    """
    if threat_model.get("norm") == "mixed":
        return "differs between the attacks, see their settings"
    words = _NORM_WORDS.get(str(threat_model.get("norm")))
    if words is None or threat_model.get("eps") is None:
        return ", ".join(f"{name}={setting_text(name, value)}" for name, value in threat_model.items())
    phrase = words.format(eps=eps_text(threat_model["eps"]))
    bounds = threat_model.get("bounds")
    if isinstance(bounds, (list, tuple)) and len(bounds) == 2:
        phrase += f", within [{eps_text(bounds[0])}, {eps_text(bounds[1])}]"
    return phrase


def setting_text(name: str, value: Any) -> str:
    """Return one setting of an attack in few characters."""
    if name in _RADII:
        return eps_text(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(setting_text(name, entry) for entry in value)}]"
    return str(value)


def short_settings(settings: Mapping[str, Any]) -> str:
    """Return the class of an attack and the settings that matter most.

    Example:
        >>> short_settings({"attack": "PGD", "norm": "linf", "eps": 0.1, "steps": 20, "restarts": 1})
        'PGD eps=0.1 steps=20'
    """
    kind = settings.get("name") if settings.get("attack") == "TorchAttack" else settings.get("attack")
    parts = [] if kind is None else [str(kind)]
    for name in _SHORT:
        value = settings.get(name)
        if value is not None and value != _USUAL.get(name):
            parts.append(f"{name}={setting_text(name, value)}")
    if settings.get("targeted"):
        parts.append("targeted")
    return " ".join(parts)


def checks_text(result: EvaluationResult) -> str:
    """Return how many checks passed, which did not, and how many were not run; empty without checks."""
    if not result.checks:
        return ""
    run = [name for name, check in result.checks.items() if check.passed is not None]
    failed = result.failed_checks
    left_out = len(result.checks) - len(run)
    more = f", {left_out} not run" if left_out else ""
    if failed:
        return f"{len(failed)} of {len(run)} checks FAILED: {', '.join(failed)}{more}"
    if len(run) == 1:
        return f"1 check passed{more}"
    return f"all {len(run)} checks{' that were run' if left_out else ''} passed{more}"


def bound_text(result: EvaluationResult) -> str:
    """Return what kind of number the robust accuracy is: "AutoAttack standard", or an upper bound and why."""
    # under several threat models the worst case is that of none of them
    mixed = result.threat_model.get("norm") == "mixed"
    return "AutoAttack standard" if standard_autoattacks(result) and not mixed else "upper bound"


def standard_autoattacks(result: EvaluationResult) -> list[str]:
    """Return the names of the attacks that are AutoAttack in its standard version, as published.

    With fewer than four classes none is: the losses are others then (check "classes").
    """
    published = {"attack": "AutoAttack", "version": "standard", "steps": 100, "queries": 5000, "precision": "32"}
    classes = result.checks.get("classes")
    if classes is not None and not classes.passed:
        return []
    return [
        name
        for name, score in result.attacks.items()
        if all(score.settings.get(option) == value for option, value in published.items())
    ]


def exact_text(value: Any) -> str:
    """Return a radius as people write it and, where that is not the number itself, the exact one.

    Example:
        >>> exact_text(8 / 255), exact_text(0.3)
        ('8/255 = 0.03137254901960784', '0.3')
    """
    short = eps_text(value)
    return short if short == repr(value) else f"{short} = {value!r}"


def attack_names(results: Iterable[EvaluationResult]) -> list[str]:
    """Return the names of all attacks, each once, in the order in which they first appear."""
    return list(dict.fromkeys(name for result in results for name in result.attacks))
