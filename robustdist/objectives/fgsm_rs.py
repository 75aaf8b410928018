"""Fast adversarial training: one step from a random start."""

from __future__ import annotations

from robustdist.attacks.base import Attack
from robustdist.errors import UsageError
from robustdist.objectives.pgd_at import PGDAT

__all__ = ["FGSMRS"]


class FGSMRS(PGDAT):
    r"""Train on one FGSM step from a uniform random start of the ball.

    .. math:: \delta_0 \sim U(-\epsilon, \epsilon), \quad
              \delta = \Pi\big(\delta_0 + c \, \epsilon \, \mathrm{sign} \nabla \ell(x + \delta_0)\big)

    Cheap, and prone to catastrophic overfitting at large radii: within an epoch the accuracy under several steps falls
    to nothing while that under one step rises; :class:`~robustdist.callbacks.CatastrophicOverfittingGuard` watches it.
    The gradient is taken in the attack's ``model_mode``, eval by default, where the released code trains: set "train"
    for that.

    Args:
        step_factor: Length :math:`c` of the step over the radius.

    Raises:
        UsageError: If ``step_factor`` is not positive.

    References:
        Wong et al., "Fast is better than free: Revisiting adversarial training".
    """

    def __init__(self, step_factor: float = 1.25) -> None:
        if not step_factor > 0:
            raise UsageError(f"step_factor={step_factor} must be positive")
        self.step_factor = step_factor

    def adapt(self, attack: Attack) -> Attack:
        """Return the attack with one step from a random start."""
        step_size = self.step_factor * attack.eps
        return attack.variant(steps=1, step_size=step_size, random_start=True, restarts=1, start_std=None)
