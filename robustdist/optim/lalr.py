"""The layer-wise adaptive learning rate of distributed adversarial training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from robustdist.errors import UsageError

__all__ = ["LALR"]


class LALR(Optimizer):
    r"""Adam direction, rescaled per tensor to the tensor's own norm.

    For every parameter tensor (biases and normalisation weights included), without bias correction:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= m / (\sqrt v + \epsilon) + w \theta \\
        r &= \min(\max(\|\theta\|_2, c_l), c_u) / \|u\|_2 \quad (r = 1 \text{ if numerator or denominator is } 0) \\
        \theta &\leftarrow \theta - \eta \, r \, u

    The update is almost free of the gradient's scale, so gradient clipping and loss scaling hardly change it. A
    tensor that starts at zero takes a step with :math:`r = 1` unless :math:`c_l > 0`, larger than that of other
    layers. Norms are taken over whole tensors: weights sharded over processes are not supported.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate :math:`\eta`.
        betas: Decay of the running means :math:`\beta_1, \beta_2`.
        eps: Added to the denominator, positive.
        weight_decay: Coefficient :math:`w` of the decay inside the trust ratio.
        clamp: Bounds :math:`(c_l, c_u)` on the weight norm.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Zhang et al., "Distributed Adversarial Training to Robustify Deep Neural Networks at Scale".
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes".

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LALR([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([1.0, 1.0])
        >>> optimizer.step()
        >>> torch.linalg.vector_norm(weight.detach() - torch.tensor([3.0, 4.0]))  # lr * ||theta||
        tensor(0.5000)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-4,
        clamp: tuple[float, float] = (0.0, 10.0),
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0):
            raise UsageError(f"lr={lr} and weight_decay={weight_decay} must not be negative")
        if not eps > 0:
            raise UsageError(f"eps={eps} must be positive: an entry without a gradient divides by it")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas={betas} must be two numbers in [0, 1)")
        if len(clamp) != 2 or not 0 <= clamp[0] <= clamp[1] or clamp[1] == 0:
            raise UsageError(f"clamp={clamp} must be (low, high) with 0 <= low <= high and high > 0")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clamp": clamp}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Raises:
            UsageError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise UsageError("LALR does not take sparse gradients: create the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        mean, mean_square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        mean_square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = mean / mean_square.sqrt().add_(group["eps"])
        if group["weight_decay"] != 0:
            update.add_(parameter, alpha=group["weight_decay"])
        weight_norm = torch.linalg.vector_norm(parameter).clamp(*group["clamp"])
        update_norm = torch.linalg.vector_norm(update)
        # torch.where, not a Python branch: no value has to come back from the device
        usable = (weight_norm > 0) & (update_norm > 0)
        ratio = torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
        parameter.sub_(update.mul_(ratio * group["lr"]))
