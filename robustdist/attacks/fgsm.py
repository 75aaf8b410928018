"""The fast gradient sign method."""

from __future__ import annotations

from typing import Any

from robustdist.attacks.pgd import PGD
from robustdist.types import Number

__all__ = ["FGSM"]


class FGSM(PGD):
    r"""One step of size ``step_size`` (default ``eps``) along the sign of the gradient.

    .. math:: x' = \Pi( x_0 + \alpha \, \mathrm{sign} \nabla_x \ell(x_0, y) )

    With ``random_start=True`` and ``step_size=1.25 * eps`` this is the inner step of fast adversarial training and the
    FGSM oracle of distributed adversarial training. For "l2" and "l1" the step is the normalised one of that norm.

    Args:
        eps: Radius in pixel units.
        step_size: Length of the step; default ``eps``.
        random_start: Start from a random point of the ball.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`.

    References:
        Goodfellow et al., "Explaining and Harnessing Adversarial Examples".
        Wong et al., "Fast is better than free: Revisiting adversarial training".
    """

    def __init__(
        self, *, eps: Number = "8/255", step_size: Number | None = None, random_start: bool = False, **kwargs: Any
    ) -> None:
        step_size = eps if step_size is None else step_size
        super().__init__(eps=eps, steps=1, step_size=step_size, random_start=random_start, **kwargs)
