"""What a robust evaluation found, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

__all__ = [
    "CHECKS",
    "AttackScore",
    "Check",
    "ClassScore",
    "CurvePoint",
    "EvaluationResult",
    "Examples",
    "SavedScore",
    "Step",
    "wilson_interval",
]


#: All checks in the order of a report. Those of the second line need attacks of their own (robustdist.diagnostics).
CHECKS = (
    "budget", "gradient", "logits", "deterministic", "counted_once", "plain_forward", "classes", "zero_radius",
    "one_step", "larger_radius", "more_steps", "black_box", "transfer",
)  # fmt: skip


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    r"""Return the Wilson score interval of a proportion (95 % by default), within [0, 1].

    .. math:: \frac{\hat p + z^2/2n \pm z \sqrt{\hat p (1 - \hat p)/n + z^2/4n^2}}{1 + z^2/n}

    References:
        Wilson, "Probable Inference, the Law of Succession, and Statistical Inference".

    Example:
        >>> low, high = wilson_interval(8, 10)
        >>> round(low, 3), round(high, 3)
        (0.49, 0.943)
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True)
class AttackScore:
    """One attack: how many samples stayed right, the seconds it took on the slowest rank, and its settings."""

    num_robust: int
    seconds: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One test of the evaluation itself: passed, failed, or (``passed`` is None) not run; ``detail`` says why."""

    passed: bool | None
    detail: str


@dataclass(frozen=True)
class ClassScore:
    """The samples of one class or loader: how many there are, how many are right, and stay right under every attack."""

    label: int
    num_samples: int
    num_clean: int
    num_robust: int

    @property
    def clean_acc(self) -> float:
        """Share of samples that are right without attack."""
        return self.num_clean / max(1, self.num_samples)

    @property
    def robust_acc(self) -> float:
        """Share of samples that stay right under every attack."""
        return self.num_robust / max(1, self.num_samples)


@dataclass(frozen=True)
class Step:
    """One step of the waterfall: how many samples are still right after it."""

    name: str
    num_robust: int


@dataclass(frozen=True)
class CurvePoint:
    """Accuracy of a subset under one attack: ``num_right`` of ``num_samples`` at ``value`` (radius, steps, ...)."""

    value: float
    num_right: int
    num_samples: int


@dataclass(frozen=True)
class SavedScore:
    """Saved adversarial examples measured again from their file.

    Attributes:
        file: Name of the file in the folder of the report.
        num_samples: Examples in it.
        num_right: Examples still classified correctly as saved, in float32; None if they could not be measured.
        num_right_8bit: The same after rounding to the nearest of 256 levels; None where pixels have no range.
    """

    file: str
    num_samples: int
    num_right: int | None
    num_right_8bit: int | None


@dataclass(frozen=True)
class Examples:
    """A few samples for the eye, on the CPU, in pixel units; all of the same length."""

    x: Tensor
    x_adv: Tensor
    y: list[int]
    predicted: list[int]
    predicted_adv: list[int]


@dataclass(frozen=True)
class EvaluationResult:
    """A finished evaluation, summed over all processes.

    Attributes:
        num_samples: Samples evaluated, each counted once.
        num_clean: Samples classified correctly without attack.
        num_robust: Samples classified correctly without attack and under every attack.
        attacks: Score of each attack by name.
        threat_model: ``norm``, ``eps`` and ``bounds`` shared by the attacks.
        checks: Tests of the evaluation itself, by name; also those that were not run.
        seed: Seed of the attacks.
        classes: One entry per class that occurs, in the order of labels.
        loaders: The same per loader that had samples, in their order; ``label`` is the place of the loader.
        waterfall: From clean through all attacks in order: what was still right after each.
        curves: Accuracy of a subset against "eps", "steps" and "restarts", where measured.
        precision: Number format of the inputs that were attacked, for example "float32".
        model_hash: Hash of all weights and buffers that were judged.
        saved: Saved adversarial examples, measured again.
    """

    num_samples: int
    num_clean: int
    num_robust: int
    attacks: dict[str, AttackScore]
    threat_model: dict[str, Any]
    checks: dict[str, Check] = field(default_factory=dict)
    seed: int = 0
    classes: list[ClassScore] = field(default_factory=list)
    loaders: list[ClassScore] = field(default_factory=list)
    waterfall: list[Step] = field(default_factory=list)
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)
    precision: str | None = None
    model_hash: str | None = None
    saved: SavedScore | None = None

    @property
    def clean_acc(self) -> float:
        """Share of samples that are right without attack."""
        return self.num_clean / max(1, self.num_samples)

    @property
    def robust_acc(self) -> float:
        """Share of samples that stay right under every attack."""
        return self.num_robust / max(1, self.num_samples)

    def attack_acc(self, name: str) -> float:
        """Share of samples that stay right under one attack."""
        return self.attacks[name].num_robust / max(1, self.num_samples)

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that were run and did not pass."""
        return [name for name, check in self.checks.items() if check.passed is False]

    @property
    def unchecked(self) -> list[str]:
        """Names of the checks that were not run, or could not be."""
        return [name for name in CHECKS if name not in self.checks or self.checks[name].passed is None]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``report.json``; checks that were not run stand apart, under "checks_not_run"."""
        return {
            "clean_acc": self.clean_acc,
            "robust_acc": self.robust_acc,
            "clean_acc_interval": list(wilson_interval(self.num_clean, self.num_samples)),
            "robust_acc_interval": list(wilson_interval(self.num_robust, self.num_samples)),
            "num_samples": self.num_samples,
            "threat_model": self.threat_model,
            "attacks": {
                name: {
                    "acc": self.attack_acc(name),
                    "interval": list(wilson_interval(score.num_robust, self.num_samples)),
                    "seconds": score.seconds,
                    "settings": score.settings,
                }
                for name, score in self.attacks.items()
            },
            "checks": {name: asdict(check) for name, check in self.checks.items() if check.passed is not None},
            "checks_not_run": {name: check.detail for name, check in self.checks.items() if check.passed is None},
            "seed": self.seed,
            "precision": self.precision,
            "model_hash": self.model_hash,
            "classes": [_with_interval(score) for score in self.classes],
            "loaders": [_with_interval(score) for score in self.loaders],
            "waterfall": [asdict(step) for step in self.waterfall],
            "curves": {
                name: [asdict(point) | {"interval": list(_interval(point))} for point in points]
                for name, points in self.curves.items()
            },
            "saved": None if self.saved is None else asdict(self.saved),
        }

    @classmethod
    def from_dict(cls, report: Mapping[str, Any]) -> EvaluationResult:
        """Return the result that :meth:`to_dict` wrote."""
        total = report["num_samples"]
        checks = {name: Check(**entry) for name, entry in report["checks"].items()}
        checks |= {name: Check(None, detail) for name, detail in report.get("checks_not_run", {}).items()}
        saved = report.get("saved")
        return cls(
            num_samples=total,
            num_clean=round(report["clean_acc"] * total),
            num_robust=round(report["robust_acc"] * total),
            attacks={
                name: AttackScore(round(entry["acc"] * total), entry["seconds"], entry["settings"])
                for name, entry in report["attacks"].items()
            },
            threat_model=report["threat_model"],
            checks=checks,
            seed=report["seed"],
            classes=[ClassScore(**_without(entry, "robust_interval")) for entry in report.get("classes", [])],
            loaders=[ClassScore(**_without(entry, "robust_interval")) for entry in report.get("loaders", [])],
            waterfall=[Step(**entry) for entry in report.get("waterfall", [])],
            curves={
                name: [CurvePoint(**_without(entry, "interval")) for entry in points]
                for name, points in report.get("curves", {}).items()
            },
            precision=report.get("precision"),
            model_hash=report.get("model_hash"),
            saved=None if saved is None else SavedScore(**saved),
        )


def _with_interval(score: ClassScore) -> dict[str, Any]:
    return asdict(score) | {"robust_interval": list(wilson_interval(score.num_robust, score.num_samples))}


def _interval(point: CurvePoint) -> tuple[float, float]:
    return wilson_interval(point.num_right, point.num_samples)


def _without(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}
