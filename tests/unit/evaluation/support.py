"""What the tests of the evaluation share: nets and attacks whose verdicts are known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, Attack, AttackResult, Problem
from robustdist.evaluation import RobustTally
from robustdist.report import EvaluationResult

NUM_CLASSES = 4


class Echo(nn.Module):
    """The first pixels are the logits; counts its forwards."""

    def __init__(self, factor: float = 5.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.factor * x.flatten(1)[:, :NUM_CLASSES]


class Breaks(Attack):
    """Turns exactly the samples of the given ids into the class ``by`` later; notes what it is asked to attack."""

    def __init__(self, *ids: int, eps: float = 1.0, by: int = 1, **kwargs: Any) -> None:
        super().__init__(eps=eps, step_size=1.0, **kwargs)
        self.ids, self.by = set(ids), by
        self.asked: list[list[int]] = []

    def perturb(self, problem: Problem) -> Tensor:
        sample_ids = list(problem.noise.sample_ids)
        self.asked.append(sample_ids)
        problem.gradient(problem.x)
        broken = torch.tensor([sample_id in self.ids for sample_id in sample_ids])
        return torch.where(broken[:, None], problem.x.roll(self.by, -1), problem.x)


class Shifted(PGD):
    """An attack that cheats: what is returned is not what was projected."""

    def __init__(self, shift: Any, **kwargs: Any) -> None:
        super().__init__(steps=1, **kwargs)
        self.shift = shift

    def run(self, *args: Any, **kwargs: Any) -> AttackResult:
        found = super().run(*args, **kwargs)
        return AttackResult(found.x_adv + self.shift, found.no_gradient)


def images(classes: Sequence[int]) -> Tensor:
    """Images on which Echo answers with the given classes."""
    return 0.2 + 0.5 * F.one_hot(torch.tensor(classes), NUM_CLASSES).float()


def tally_of(
    attacks: dict[str, Attack], module: nn.Module, x: Tensor, y: Tensor, batch_size: int | None = None, **kwargs: Any
) -> RobustTally:
    tally = RobustTally(attacks, **kwargs)
    for rows in torch.arange(len(x)).split(batch_size or max(1, len(x))):
        tally.update(module, module, x[rows], y[rows], rows.tolist())
    return tally


def numbers(result: EvaluationResult) -> tuple:
    robust = {name: score.num_robust for name, score in result.attacks.items()}
    return result.num_samples, result.num_clean, result.num_robust, robust


def attacked(tally: RobustTally) -> int:
    """How often an image was attacked."""
    return int(tally.records.clean.sum()) * len(tally.attacks)


def blind(tally: RobustTally) -> int:
    """How often an attack had no gradient to follow."""
    return sum(int(tally.records.column(name, "blind").sum()) for name in tally.attacks)


def check(tally: RobustTally, name: str) -> bool:
    return tally.result().checks[name].passed


def attacks() -> dict[str, Attack]:
    return {
        "pgd": PGD(eps=0.03, steps=3),
        "far": PGD(eps=0.4, steps=1, step_size=0.001, seed=5),  # little more than its random start
        "l2": PGD(norm="l2", eps=0.15, steps=3),
        "fgsm": FGSM(eps=0.02),
    }
