"""Projected gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.errors import UsageError
from robustdist.types import Number, check_count, parse_number

__all__ = ["PGD"]


class PGD(Attack):
    r"""Projected gradient descent on the input.

    .. math:: x_{k+1} = \Pi_{B_\epsilon(x) \cap [lo, hi]} \big( x_k + \alpha \, d(\nabla_x \ell(x_k, y)) \big)

    with :math:`d` the sign (linf), the normalised gradient (l2) or a sparse step (l1). With ``restarts`` the best of
    several random starts is kept per sample: a misclassified one before any other, then the larger loss.

    Args:
        steps: Number of gradient steps, at least 1.
        step_size: Length of a step; default ``2.5 * eps / steps``.
        random_start: Start from a random point of the ball instead of from ``x``.
        restarts: Number of runs from different starts, at least 1; more than one needs ``random_start``.
        start_std: If given, a random start adds normal noise of this standard deviation in pixel units to ``x`` in
            the place of a uniform draw from the ball.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks".

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
        >>> x_adv = PGD(eps=0.1, steps=3)(model, x, y)
        >>> bool((x_adv - x).abs().max() <= 0.1 + 1e-6)
        True
    """

    def __init__(
        self,
        *,
        eps: Number = "8/255",
        steps: int = 10,
        step_size: Number | None = None,
        random_start: bool = True,
        restarts: int = 1,
        start_std: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_count(steps, "steps")
        check_count(restarts, "restarts")
        if restarts > 1 and not random_start:
            raise UsageError("restarts > 1 repeats the same run unless random_start=True: set it, or use restarts=1")
        if step_size is None:
            step_size = 2.5 * parse_number(eps, "eps") / steps
        super().__init__(eps=eps, step_size=step_size, **kwargs)
        self.steps = steps
        self.random_start = random_start
        self.restarts = restarts
        self.start_std = start_std

    def perturb(self, problem: Problem) -> Tensor:
        """Run ``restarts`` times and keep the best result per sample."""
        best = self._descend(problem, 0)
        if self.restarts == 1:
            return best
        best_wrong, best_loss = self._judge(problem, best)
        for restart in range(1, self.restarts):
            candidate = self._descend(problem, restart)
            wrong, loss = self._judge(problem, candidate)
            # any success ranks above every failure, then the larger loss counts
            better = (wrong & ~best_wrong) | ((wrong == best_wrong) & (loss > best_loss))
            best_wrong, best_loss = torch.where(better, wrong, best_wrong), torch.where(better, loss, best_loss)
            best = torch.where(better.view(-1, *[1] * (best.dim() - 1)), candidate, best)
        return best

    def start(self, problem: Problem, restart: int = 0) -> Tensor:
        """Return the points from which a run begins."""
        if self.random_start and self.start_std is not None:
            return problem.project(problem.x + self.start_std * problem.noise.normal(problem.x, "start", restart))
        return problem.start(restart) if self.random_start else problem.x

    def _descend(self, problem: Problem, restart: int) -> Tensor:
        x_adv = self.start(problem, restart)
        for _ in range(self.steps):
            grad = problem.gradient(x_adv)
            x_adv = problem.project(x_adv + problem.step_size * problem.ascent(grad, x_adv))
        return x_adv

    def _judge(self, problem: Problem, x_adv: Tensor) -> tuple[Tensor, Tensor]:
        """Return per sample whether the attack succeeded (never, for a custom loss) and the loss."""
        with torch.no_grad():
            logits = problem.logits(x_adv)
            loss = problem.loss(logits, problem.y)
        if loss.shape != (len(x_adv),):
            raise UsageError(
                "restarts > 1 compares samples, so attack_loss must return one value per sample (reduction='none')"
            )
        if not isinstance(self.attack_loss, str):
            return torch.zeros_like(loss, dtype=torch.bool), loss
        return (logits.argmax(1) == problem.y) == self.targeted, loss
