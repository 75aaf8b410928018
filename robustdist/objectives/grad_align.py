"""GradAlign."""

from __future__ import annotations

import torch
from torch import Tensor

from robustdist.attacks.base import Attack
from robustdist.core.double_backward import twice_differentiable
from robustdist.core.strided import strided_pointwise
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.fgsm_rs import FGSMRS

__all__ = ["GradAlign"]


class GradAlign(Objective):
    r"""FGSM training with a regulariser that keeps the input gradient aligned within the ball.

    .. math:: \ell(\theta; x', y) + \lambda \, E\big[1 - \cos(g(x), g(x + \eta))\big], \quad
              g = \nabla_x \ell, \; \eta \sim U(-\epsilon, \epsilon)

    As in the released code :math:`g(x)` is detached and samples whose gradient vanishes are left out; here the
    point :math:`x + \eta` stays inside the image box. Needs double backward: torch's own attention is written out
    for it, other fused kernels lack it, and compiled modules are refused. The published weights,
    exp(eps ln(10)/8 + ln 0.02) for eps in 1/255, belong to CIFAR-10.

    Args:
        weight: Weight :math:`\lambda` of the regulariser, at least 0.
        step_factor: Length of the FGSM step over the radius.

    Raises:
        UsageError: If ``weight`` is negative or the module is compiled.

    References:
        Andriushchenko and Flammarion, "Understanding and Improving Fast Adversarial Training".
    """

    def __init__(self, weight: float = 0.2, step_factor: float = 1.25) -> None:
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weight={weight} must be a finite number that is not negative")
        self.weight = weight
        self.needs_second_pass = self.needs_double_backward = weight > 0
        self.step_factor = step_factor
        self._single_step = FGSMRS(step_factor)

    def adapt(self, attack: Attack) -> Attack:
        """Return one step from a random start."""
        return self._single_step.adapt(attack)

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the loss at the adversarial inputs plus the weighted misalignment."""
        loss = context.loss(context.attack(context.x, context.y))
        if loss is None or self.weight == 0:
            return loss
        problem = context.problem()
        noisy = problem.start("align")

        def gradient(at: Tensor, *, create_graph: bool) -> Tensor:
            leaf = at.detach().requires_grad_()
            with twice_differentiable() if create_graph else strided_pointwise(context.module, at.device):
                logits = problem.logits(leaf)
            # scaled on its way through half precision, as the update is; the cosine does not see it
            value = problem.loss_scale * problem.loss(logits, problem.y).sum()
            return torch.autograd.grad(value, leaf, create_graph=create_graph)[0].flatten(1)

        clean_grad, noisy_grad = gradient(problem.x, create_graph=False), gradient(noisy, create_graph=True)
        norms = torch.linalg.vector_norm(clean_grad, dim=1) * torch.linalg.vector_norm(noisy_grad.detach(), dim=1)
        usable = (norms > 0) & torch.isfinite(norms)
        # eps is a floor under the norms, and those of confident nets lie far below its default of 1e-8
        cosines = torch.cosine_similarity(clean_grad[usable], noisy_grad[usable], dim=1, eps=0.0)
        misalignment = (1 - cosines).mean() if bool(usable.any()) else loss.new_zeros(())
        context.logs["misalignment"] = misalignment.detach()
        return loss + self.weight * misalignment
