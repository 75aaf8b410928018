"""What a robust evaluation found, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["AttackScore", "Check", "EvaluationResult", "Examples", "wilson_interval"]


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
    """One test of the evaluation itself."""

    passed: bool
    detail: str


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
        checks: Tests of the evaluation itself, by name.
        seed: Seed of the attacks.
    """

    num_samples: int
    num_clean: int
    num_robust: int
    attacks: dict[str, AttackScore]
    threat_model: dict[str, Any]
    checks: dict[str, Check] = field(default_factory=dict)
    seed: int = 0

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

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``report.json``."""
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
            "checks": {name: asdict(check) for name, check in self.checks.items()},
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, report: Mapping[str, Any]) -> EvaluationResult:
        """Return the result that :meth:`to_dict` wrote."""
        total = report["num_samples"]
        return cls(
            num_samples=total,
            num_clean=round(report["clean_acc"] * total),
            num_robust=round(report["robust_acc"] * total),
            attacks={
                name: AttackScore(round(entry["acc"] * total), entry["seconds"], entry["settings"])
                for name, entry in report["attacks"].items()
            },
            threat_model=report["threat_model"],
            checks={name: Check(**entry) for name, entry in report["checks"].items()},
            seed=report["seed"],
        )
