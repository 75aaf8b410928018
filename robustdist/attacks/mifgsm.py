"""Momentum iterative FGSM."""

from typing import Any

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.functional import ascent_step
from robustdist.types import Number, check_count, parse_number

__all__ = ["MIFGSM"]


class MIFGSM(Attack):
    r"""Steps along a decaying sum of gradients, each scaled to unit mean magnitude; transfers well.

    .. math:: m_{k+1} = \mu m_k + g_k / \mathrm{mean}|g_k|, \quad x_{k+1} = \Pi(x_k + \alpha \, d(m_{k+1}))

    Args:
        eps: Radius in pixel units.
        steps: Number of steps of length ``eps / steps``.
        decay: Factor :math:`\mu` on the earlier gradients.

    References:
        Dong et al., "Boosting Adversarial Attacks with Momentum".
    """

    def __init__(self, *, eps: Number = "8/255", steps: int = 10, decay: float = 1.0, **kwargs: Any) -> None:
        super().__init__(eps=eps, step_size=parse_number(eps, "eps") / check_count(steps, "steps"), **kwargs)
        self.steps, self.decay = steps, decay

    def perturb(self, problem: Problem) -> Tensor:
        """Return the end point of the steps."""
        x_adv, total = problem.x, torch.zeros_like(problem.x)
        for _ in range(self.steps):
            grad = problem.gradient(x_adv)
            total = self.decay * total + grad / grad.abs().mean(list(range(1, grad.dim())), keepdim=True).clamp(1e-12)
            x_adv = problem.project(x_adv + problem.step_size * ascent_step(total, x_adv, self.norm, self.bounds))
        return x_adv
