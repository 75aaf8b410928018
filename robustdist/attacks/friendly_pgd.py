"""PGD that stops soon after it has succeeded."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.functional import per_row, project
from robustdist.attacks.losses import LossName, check_class_indices
from robustdist.attacks.pgd import PGD
from robustdist.errors import UsageError
from robustdist.types import AttackLoss, Number, parse_number

__all__ = ["FriendlyPGD"]

_NO_CLASSES = "FriendlyPGD stops at wrong classes, which a loss of your own does not tell: use attack_loss='ce', or PGD"


class FriendlyPGD(PGD):
    r"""PGD whose every sample stops ``tau`` steps after its first misclassified iterate.

    The result is the least adversarial of the points that fool the model, within ``tau`` steps, in place of the most
    adversarial one. A sample that is wrong at the start and has no patience does not move. Stopped samples leave the
    batch, so an attack on a weak model costs less; the order of the batch is kept.

    Args:
        tau: Steps that a sample still takes once it is misclassified, at least 0; with ``tau >= steps`` this is PGD.
        noise_std: Standard deviation of normal noise added in every step, in pixel units.
        **kwargs: As in :class:`~robustdist.attacks.PGD`, without restarts, which would prefer the most adversarial.

    Attributes:
        mean_steps: Steps that the samples of the last call took, on average; None before the first.

    Raises:
        UsageError: If an argument is out of range, or the loss is not one of classes.

    References:
        Zhang et al., "Attacks Which Do Not Kill Training Make Adversarial Learning Stronger".
    """

    supports_targeted = False

    def __init__(self, *, tau: int = 0, noise_std: Number = 0.0, **kwargs: Any) -> None:
        if isinstance(tau, bool) or not isinstance(tau, int) or tau < 0:
            raise UsageError(f"tau={tau!r} must be a whole number that is not negative")
        self.noise_std = parse_number(noise_std, "noise_std")
        if not 0 <= self.noise_std < float("inf"):
            raise UsageError(f"noise_std={noise_std} must be a finite number that is not negative")
        super().__init__(**kwargs)
        if self.restarts > 1:
            raise UsageError("restarts > 1 looks for the most adversarial point, FriendlyPGD for the least: use 1")
        self.tau = tau
        self.mean_steps: Tensor | None = None

    @classmethod
    def like(cls, attack: PGD, *, tau: int, noise_std: Number) -> FriendlyPGD:
        """Return this attack with all other settings of ``attack``.

        Raises:
            UsageError: If ``attack`` increases a loss of the user's, for which nobody can say what a success is.
        """
        if callable(attack.attack_loss):
            raise UsageError(_NO_CLASSES)
        changed = cls(tau=tau, noise_std=noise_std)
        for name, value in vars(attack).items():
            setattr(changed, name, copy.copy(value))
        changed.restarts = 1
        return changed

    def perturb(self, problem: Problem) -> Tensor:
        """Move the samples that are still at it."""
        x_adv = self.start(problem)
        patience = torch.full((len(x_adv),), self.tau, device=x_adv.device)
        num_steps = torch.zeros(len(x_adv), device=x_adv.device)
        fooled = torch.zeros(len(x_adv), dtype=torch.bool, device=x_adv.device)
        moving = torch.ones_like(fooled)
        for step in range(self.steps):
            # a forward pass that reads the whole batch gets it
            rows = moving.nonzero()[:, 0] if problem.rowwise else torch.arange(len(x_adv), device=x_adv.device)
            if len(rows) == 0:
                break
            part, y = x_adv[rows], problem.y[rows]
            logits, _, grad = problem.evaluate(part, partial(_loss, problem, y), rows)
            if step == 0:
                check_class_indices(logits, y)
            fooled[rows] |= problem.reached(logits, y)
            moving &= ~(fooled & (patience == 0))
            patience -= fooled.to(patience.dtype)
            num_steps += moving
            moved = part + problem.step_size * problem.ascent(grad, part)
            if self.noise_std > 0:
                moved = moved + self.noise_std * problem.noise.normal(x_adv, "friendly", step)[rows]
            moved = project(moved, problem.x[rows], problem.eps, problem.norm, problem.bounds)
            x_adv = x_adv.index_put((rows,), torch.where(per_row(moving[rows], part), moved, part))
        self.mean_steps = num_steps.mean()
        return x_adv

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Return a copy of the attack that increases another loss of classes."""
        if callable(attack_loss):
            raise UsageError(_NO_CLASSES)
        return super().with_loss(attack_loss)

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values."""
        return {name: value for name, value in super().settings().items() if name != "mean_steps"}


def _loss(problem: Problem, y: Tensor, logits: Tensor) -> Tensor:
    return problem.loss(logits, y)
