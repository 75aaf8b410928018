"""Fast bi-level adversarial training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from robustdist.core.double_backward import twice_differentiable
from robustdist.core.strided import strided_pointwise
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.types import Number, parse_number

__all__ = ["FastBAT"]

# How far inside the box a coordinate must lie to count as free.
_INTERIOR = 1e-7


class _Solution(torch.autograd.Function):
    """The inner solution, as a function of the gradient of the loss that it steps along."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, delta: Tensor, interior: Tensor, weight: float, ratio: Tensor) -> Tensor:
        ctx.save_for_backward(interior)
        ctx.weight, ctx.ratio = weight, ratio
        return delta.view_as(delta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sensitivity: Tensor) -> tuple[Tensor, None, None, None, None]:
        (interior,) = ctx.saved_tensors
        implicit = interior * sensitivity * ctx.weight
        ctx.ratio.copy_(implicit.norm() / sensitivity.norm().clamp(min=1e-30))
        return implicit, None, None, None, None


class FastBAT(Objective):
    r"""One bi-level step: the perturbation is a function of the weights, and its derivative is part of the gradient.

    The inner problem is linearised at :math:`z`, so that its solution in the box
    :math:`C = [\max(-\epsilon, lo - x), \min(\epsilon, hi - x)]` is closed,

    .. math:: \delta^*(\theta) = \Pi_C(z - s \, \nabla_\delta \ell_{atk}(\theta; x + z)), \quad \ell_{atk} = -\ell

    with :math:`z` itself one such step from a uniform start. With a piecewise-linear network the implicit part of the
    gradient acts on the coordinates strictly inside the box (:math:`H`). The loss is :math:`\ell(x + \delta^*)`, and in
    its one backward pass :math:`\delta^*` has the derivative

    .. math:: \partial_\theta \delta^* = -H \, \partial_\theta \nabla_\delta \ell_{atk}(\theta; x + z) / \lambda

    The step :math:`s` is not scale free: the constant of the released code (5000/255 up to a radius of 8/255 and
    2000/255 above it, for summed cross-entropy on CIFAR-10) is a weak attack where a confident net has small gradients.
    ``step="relative"`` therefore scales every sample's step to its gradient, so that its mean absolute entry moves by
    ``step_factor`` radii. Radii are the configured one in both rules, whatever an ``eps_schedule`` has reached; a
    ``step_size_schedule`` (by default the ``eps_schedule``) and a guard multiply every step.

    Logged: ``fast_bat/interior_fraction`` (share of :math:`H`) and ``fast_bat/ig_ratio``, the norm of
    :math:`H \nabla_{\delta^*} \ell / \lambda` over that of :math:`\nabla_{\delta^*} \ell`: a ratio of gradients of the
    inputs. That of the two parts of the weights' gradient is another number. Needs double backward: compiled modules
    and compiled autograd are refused, unless ``implicit_weight=0``.

    Args:
        step: "relative", "paper", or a number :math:`s`.
        step_factor: For "relative", radii that the mean absolute gradient entry moves by.
        implicit_weight: :math:`1/\lambda` of the implicit term; 0.1 in the released code, 0 leaves it out.

    Raises:
        UsageError: If an argument is out of range, the norm is not linf or the module is compiled.

    References:
        Zhang et al., "Revisiting and Advancing Fast Adversarial Training Through the Lens of Bi-Level Optimization".
    """

    def __init__(self, step: Number = "relative", step_factor: float = 2.0, implicit_weight: float = 0.1) -> None:
        self.step: float | str = step if step in ("relative", "paper") else parse_number(step, "step")
        if isinstance(self.step, float) and self.step <= 0:
            raise UsageError(f"step={step} must be positive, 'relative' or 'paper'")
        if not (step_factor > 0 and implicit_weight >= 0):
            raise UsageError(
                f"step_factor={step_factor} must be positive and implicit_weight={implicit_weight} not negative"
            )
        self.step_factor = step_factor
        self.implicit_weight = implicit_weight
        self.needs_second_pass = self.needs_double_backward = implicit_weight > 0

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the loss whose gradient is the bi-level one."""
        problem = context.problem()
        if problem.norm != "linf" or problem.bounds is None:
            raise UsageError("FastBAT solves its inner problem in a box: use norm='linf' and give bounds")
        x, eps, scale = problem.x, problem.eps, problem.loss_scale
        low = (problem.bounds[0] - x).clamp(min=-eps)
        high = (problem.bounds[1] - x).clamp(max=eps)

        def ascent(delta: Tensor, *, create_graph: bool) -> Tensor:
            leaf = delta.detach().requires_grad_()
            with twice_differentiable() if create_graph else strided_pointwise(context.module, x.device):
                logits = problem.logits(x + leaf)
            value = problem.loss(logits, problem.y).sum()
            # scaled on its way through half precision, as the update is
            return torch.autograd.grad(scale * value, leaf, create_graph=create_graph)[0] / scale

        def solved(delta: Tensor, grad: Tensor) -> Tensor:
            step = problem.step_scale * self._step(grad, problem.whole_eps)
            return torch.minimum(torch.maximum(delta + step * grad, low), high)

        start = torch.minimum(torch.maximum(problem.noise.uniform(x, "start").mul_(2 * eps).sub_(eps), low), high)
        z = solved(start, ascent(start, create_graph=False))
        grad = ascent(z, create_graph=self.implicit_weight > 0)
        delta = solved(z, grad.detach())
        if self.implicit_weight == 0:
            return context.loss(context.from_pixels(x + delta))
        interior = (delta > low + _INTERIOR) & (delta < high - _INTERIOR)
        ratio = x.new_full((), float("nan"))  # known after the backward pass, before the step is logged
        delta = _Solution.apply(grad, delta, interior, self.implicit_weight, ratio)
        loss = context.loss(context.from_pixels(x + delta))
        if loss is not None:
            context.logs["fast_bat/interior_fraction"] = interior.float().mean()
            context.logs["fast_bat/ig_ratio"] = ratio
        return loss

    def _step(self, grad: Tensor, eps: float) -> Tensor | float:
        if self.step == "relative":
            size = grad.detach().abs().flatten(1).mean(1).clamp(min=1e-30)
            return (self.step_factor * eps / size).view(-1, *[1] * (grad.dim() - 1))
        if self.step == "paper":
            return (5000 if eps <= 8 / 255 + 1e-9 else 2000) / 255
        assert isinstance(self.step, float)
        return self.step
