"""FreeLB."""

from __future__ import annotations

import torch
from torch import Tensor

from robustdist.core.guard import rewindable_rng
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.types import check_count

__all__ = ["FreeLB"]


class FreeLB(Objective):
    r"""Train on all points that the ascent visits, with the gradients that the ascent needs anyway.

    From a random start :math:`\delta_0` of the attack's ball, with :math:`d` the attack's direction and
    :math:`\ell` the ordinary training loss, in the mode of training,

    .. math:: \min_\theta \frac1K \sum_{k=0}^{K-1} \ell(\theta; x + \delta_k, y), \qquad
              \delta_{k+1} = \Pi\big(\delta_k + \alpha \, d(\nabla_\delta \ell(\theta; x + \delta_k, y))\big)

    The points count as constants: the parameter gradient is the mean of K gradients, as in the paper. There they add up
    over K backward passes; here they are one loss with one backward pass, so that accumulation, clipping, loss scaling
    and the reduction over processes see it whole. The price is memory: the graphs of K passes are alive at once. The
    ascent takes its gradients from the same passes: K forward and K full backward passes, and K-1 backward passes to
    the input. All passes draw the same random numbers, so that dropout has one mask along the ascent.

    The user's attack gives norm, radius and step size; its own number of steps is not used, so give ``step_size``.

    Args:
        steps: K, at least 1.

    Raises:
        UsageError: If ``steps`` is not a whole number of at least 1.

    References:
        Zhu et al., "FreeLB: Enhanced Adversarial Training for Natural Language Understanding".
    """

    def __init__(self, steps: int = 3) -> None:
        self.steps = check_count(steps, "steps")
        self.needs_second_pass = steps > 1

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the mean of the ordinary losses along the ascent."""
        problem = context.problem()
        rewind = rewindable_rng(problem.x.device)
        point = problem.start(0)
        losses: list[Tensor] = []
        for step in range(self.steps):
            point = point.detach().requires_grad_()
            rewind()
            loss = context.loss(context.from_pixels(point))
            if loss is None:
                return None
            losses.append(loss)
            if step < self.steps - 1:
                # scaled on its way through half precision, as the update is; its length plays no part
                (grad,) = torch.autograd.grad(context.loss_scale * loss, point, retain_graph=True)
                direction = problem.ascent(torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0), point.detach())
                point = problem.project(point.detach() + problem.step_size * direction)
        if self.steps > 1:
            context.logs["first_loss"] = losses[0].detach()
            context.logs["last_loss"] = losses[-1].detach()
        return torch.stack(losses).mean()
