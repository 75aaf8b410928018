"""Momentum iterative FGSM."""

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.types import Number, parse_number

__all__ = ["MIFGSM"]


class MIFGSM(Attack):
    r"""Sign steps along a decaying mean of gradients, each scaled to unit mean magnitude; transfers well.

    .. math:: m_{k+1} = \mu m_k + g_k / \mathrm{mean}|g_k|, \quad x_{k+1} = \Pi(x_k + \alpha \, \mathrm{sign}\, m_{k+1})

    Args:
        eps: Radius in pixel units.
        steps: Number of steps of length ``eps / steps``.
        decay: Factor :math:`\mu` on the earlier gradients.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`.

    References:
        Dong et al., "Boosting Adversarial Attacks with Momentum".
    """

    def __init__(self, *, eps: Number = "8/255", steps: int = 10, decay: float = 1.0, **kwargs: object) -> None:
        super().__init__(eps=eps, step_size=parse_number(eps, "eps") / steps, **kwargs)
        self.steps, self.decay = steps, decay

    def perturb(self, problem: Problem) -> Tensor:
        """Follow the running mean of the gradients."""
        x_adv, mean = problem.x, torch.zeros_like(problem.x)
        for _ in range(self.steps):
            grad = problem.gradient(x_adv)
            mean = self.decay * mean + grad / grad.abs().mean(list(range(1, grad.dim())), keepdim=True).clamp(1e-12)
            x_adv = problem.project(x_adv + problem.step_size * mean.sign())
        return x_adv
