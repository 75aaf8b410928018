"""One sign step from strong noise, not projected back: the inner step of N-FGSM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.errors import UsageError
from robustdist.types import Number

__all__ = ["NoiseFGSM"]


class NoiseFGSM(Attack):
    r"""One step from noise of ``noise`` radii; for training only, since the result may leave the ball.

    .. math:: \eta \sim U(-k\epsilon, k\epsilon), \quad x' = x + \eta + \epsilon \, \mathrm{sign} \nabla \ell(x + \eta)

    The result is clipped to the image box, but not to the ball: leaving that out is the method. The released code also
    clips the noise to the box before the gradient is taken; images with many black or white pixels then lose half of
    it.

    Args:
        eps: Radius in pixel units, also the length of the step; the norm is linf.
        noise: Size :math:`k` of the noise over the radius.
        clip_noise: Clip the noise to the image box; False takes the gradient at :math:`x + \eta`, wherever it lies.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`.

    References:
        de Jorge et al., "Make Some Noise: Reliable and Efficient Single-Step Adversarial Training".
    """

    # the radius bounds the step, not the result
    _has_eps = False

    def __init__(self, *, eps: Number = "8/255", noise: float = 2.0, clip_noise: bool = True, **kwargs: Any) -> None:
        if kwargs.get("norm", "linf") != "linf":
            raise UsageError(f"norm={kwargs['norm']!r}: noise and sign steps are about linf, use norm='linf'")
        if not 0 <= noise < float("inf"):
            raise UsageError(f"noise={noise} must be a finite number that is not negative")
        super().__init__(eps=eps, step_size=eps, **kwargs)
        self.noise = noise
        self.clip_noise = clip_noise

    def perturb(self, problem: Problem) -> Tensor:
        """Return the end point of the step."""
        radius = self.noise * problem.eps
        x_adv = problem.x + problem.noise.uniform(problem.x, "start").mul_(2 * radius).sub_(radius)
        if self.clip_noise:
            x_adv = self._boxed(x_adv)
        return self._boxed(x_adv + problem.step_size * problem.gradient(x_adv).sign())

    def _finish(self, x_adv: Tensor, problem: Problem) -> Tensor:
        return self._boxed(x_adv)

    def _boxed(self, x: Tensor) -> Tensor:
        return x if self.bounds is None else x.clamp(self.bounds[0], self.bounds[1])
