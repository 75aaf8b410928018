from __future__ import annotations

from typing import Any

import pytest
import torch

from robustdist.report import AttackScore, Check, EvaluationResult, Examples

NASTY = '<img src=x onerror="alert(1)">&$x_[red]'


def make_result(num_samples: int = 200, num_clean: int = 190, drop: int = 0, **changes: Any) -> EvaluationResult:
    attacks = {
        "fgsm": AttackScore(150 - drop, 0.5, {"attack": "FGSM", "norm": "linf", "eps": 8 / 255}),
        "pgd20": AttackScore(
            121 - drop, 134.6, {"attack": "PGD", "eps": 8 / 255, "steps": 20, "restarts": 5, "mean": None}
        ),
        NASTY: AttackScore(130 - drop, 2.25, {"attack": "TorchAttack", "name": "APGD", "steps": 10, "note": NASTY}),
    }
    arguments: dict[str, Any] = {
        "num_samples": num_samples,
        "num_clean": num_clean,
        "num_robust": 119 - drop,
        "attacks": attacks,
        "threat_model": {"norm": "linf", "eps": 8 / 255, "bounds": (0.0, 1.0)},
        "checks": {"gradient": Check(True, "all fine"), "budget": Check(False, "excess of 0.1 <pixels>")},
        "seed": 7,
    }
    return EvaluationResult(**(arguments | changes))


@pytest.fixture
def result() -> EvaluationResult:
    return make_result()


@pytest.fixture
def comparison(result) -> dict[str, EvaluationResult]:
    return {"ordinary training": make_result(drop=100), "adversarial training": result}


@pytest.fixture
def history() -> list[dict[str, float]]:
    return [
        {"epoch": epoch, "clean_acc": 0.9 + 0.01 * epoch, "pgd20_acc": 0.6 + 0.02 * epoch, "acc": 0.59 + 0.02 * epoch}
        for epoch in range(4)
    ]


@pytest.fixture
def examples() -> Examples:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5, 1, 8, 8, generator=generator)
    x_adv = (x + 8 / 255 * torch.randn(x.shape, generator=generator).sign()).clamp(0, 1)
    return Examples(x, x_adv, [0, 1, 2, 3, 4], [0, 1, 2, 3, 9], [0, 5, 2, 3, 9])
