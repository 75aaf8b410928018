"""Friendly adversarial training."""

from __future__ import annotations

from torch import Tensor

from robustdist.attacks.base import Attack
from robustdist.attacks.friendly_pgd import FriendlyPGD
from robustdist.attacks.pgd import PGD
from robustdist.attacks.token_pgd import TokenPGD
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.types import Number

__all__ = ["FriendlyAT"]


class FriendlyAT(Objective):
    r"""Train on the least adversarial of the points that fool the model.

    .. math:: \min_\theta E \, \ell(\theta; x', y), \quad
              x' = x_{\min(i + \tau, K)}, \; i = \min\{k : f(x_k) \ne y\}

    where :math:`x_0, \dots, x_K` are the iterates of PGD from a uniform start. Samples that fall early save steps
    (``robust/mean_steps``): many at the beginning of training, few at its end.

    Args:
        tau: Steps that a sample takes after its first misclassified iterate; or pairs (progress, tau) in rising order
            of progress in [0, 1], each valid from there on. The released code goes from 0 to 2 in 120 epochs:
            ``[(0.0, 0), (0.42, 1), (0.75, 2)]``.
        noise_std: Standard deviation of normal noise in every step, in pixel units; 0.001 in the released code.

    Raises:
        UsageError: If an argument is out of range, or the attack is not PGD.

    References:
        Zhang et al., "Attacks Which Do Not Kill Training Make Adversarial Learning Stronger".
    """

    def __init__(self, tau: int | list[tuple[float, int]] = 0, noise_std: Number = 0.0) -> None:
        stages = [(0.0, tau)] if isinstance(tau, int) else [(float(start), patience) for start, patience in tau]
        starts = [start for start, _ in stages]
        if not stages or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] > 1:
            raise UsageError(
                f"tau={tau!r} must be one number, or pairs (progress, tau) from progress 0 in rising order"
            )
        self.tau = tau
        self.noise_std = noise_std
        self.follows_progress = len(stages) > 1
        self._stages = stages
        self._attack: FriendlyPGD | None = None
        for _, patience in stages:
            FriendlyPGD(tau=patience, noise_std=noise_std)  # checks them

    def adapt(self, attack: Attack) -> Attack:
        """Return the attack with early stops, from a uniform start."""
        if not isinstance(attack, PGD) or isinstance(attack, TokenPGD):
            raise UsageError(f"FriendlyAT stops PGD early, {type(attack).__name__} it cannot: use attack=PGD(...)")
        uniform = attack.variant(random_start=True, start_std=None)
        assert isinstance(uniform, PGD)
        self._attack = FriendlyPGD.like(uniform, tau=self._stages[0][1], noise_std=self.noise_std)
        return self._attack

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the ordinary loss at the points where the attack stopped."""
        if self._attack is not None:
            self._attack.tau = max(stage for stage in self._stages if stage[0] <= context.progress)[1]
        x_adv = context.attack(context.x, context.y)
        if self._attack is not None and self._attack.mean_steps is not None:
            context.logs["mean_steps"] = self._attack.mean_steps
        return context.loss(x_adv)
