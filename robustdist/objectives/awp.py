"""Adversarial weight perturbation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.guard import unchanged_buffers
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.pgd_at import PGDAT
from robustdist.objectives.wrapper import Wrapper

__all__ = ["AWP"]


class _Tape:
    """Gives a second pass what attacks and references returned in the first, in the same order."""

    def __init__(self) -> None:
        self._recorded: list[Tensor] = []
        self._place: int | None = None

    def rewind(self) -> None:
        """From now on play."""
        self._place = 0

    def on(self, context: ObjectiveContext) -> ObjectiveContext:
        """Return ``context``, and all parts taken from it, on this tape."""
        return replace(
            context,
            attack=self._taped(context.attack),
            reference=self._taped(context.reference),
            take=lambda *args: self.on(context.take(*args)),
        )

    def _taped(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def play(*args: Any, **kwargs: Any) -> Tensor:
            if self._place is None:
                self._recorded.append(function(*args, **kwargs))
                return self._recorded[-1]
            self._place += 1
            return self._recorded[self._place - 1]

        return play


class AWP(Wrapper):
    r"""Take the gradient of a base objective at weights that were moved against it, layer by layer.

    .. math:: \theta_l \leftarrow \theta_l + \gamma \|\theta_l\| \frac{v_l}{\|v_l\|}, \quad
              v = \nabla_\theta L(\theta)

    for every tensor of more than one dimension whose name holds "weight" (normalisation and biases stay), where L is
    the base objective. The weights are put back, exactly, as soon as the backward pass is over, before the optimiser
    steps: an update that is skipped, clipped or accumulated finds the true weights. (The released code puts them back
    after the step, which differs by the weight decay of the perturbation.) Every process moves its own weights by its
    own data; they are equal again before the step.

    The base objective is computed twice per batch; the second pass leaves no logs, the first no trace in buffers such
    as the statistics of batch norm.

    Args:
        base: The objective; default :class:`PGDAT`.
        gamma: Size of the perturbation over the size of the weights, at least 0.
        warm_up: Share of training, in [0, 1), in which the weights stay where they are and the base objective is
            computed once. The released code does so for its first ten epochs with TRADES: ``10 / max_epochs``. Without
            a Trainer it is over where ``progress`` exceeds it.

    Raises:
        UsageError: If ``gamma`` is negative or ``warm_up`` is no share.

    References:
        Wu et al., "Adversarial Weight Perturbation Helps Robust Generalization".
    """

    def __init__(self, base: Objective | None = None, gamma: float = 0.01, *, warm_up: float = 0.0) -> None:
        if not 0 <= gamma < float("inf"):
            raise UsageError(f"gamma={gamma} must be a finite number that is not negative")
        if not 0 <= warm_up < 1:
            raise UsageError(f"warm_up={warm_up} must be in [0, 1), the share of training: 10 of 200 epochs are 0.05")
        super().__init__(base if base is not None else PGDAT())
        self.gamma = gamma
        self.warm_up = warm_up
        self.follows_progress = warm_up > 0 or self.base.follows_progress
        self.needs_second_pass = gamma > 0 or self.base.needs_second_pass
        self._originals: list[tuple[nn.Parameter, Tensor]] = []

    def check_module(self, module: nn.Module) -> None:
        """Refuse a module without weights to move, and what the base objective refuses."""
        super().check_module(module)
        if self.gamma > 0 and not _movable(module):
            raise UsageError(
                "AWP moves trainable tensors of more than one dimension named weight, and the module has none: "
                "unfreeze some, or use the base objective alone"
            )

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the base objective at the moved weights."""
        self.after_backward()
        if self.gamma == 0 or context.progress <= self.warm_up:
            return self.base.compute(context)
        # the same adversarial inputs for both passes: the attack is most of the cost
        tape = _Tape()
        context = tape.on(context)
        with unchanged_buffers(context.module):  # the statistics of batch norm count the pass that is trained on
            loss = self.base.compute(context)
        if loss is None:
            return None
        moved = _movable(context.module)
        # scaled on their way through half precision, as the update is; their lengths play no part
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(context.loss_scale * loss, moved, allow_unused=True)
        with torch.no_grad():
            for parameter, grad in zip(moved, grads, strict=True):
                if grad is None:
                    continue
                self._originals.append((parameter, parameter.detach().clone()))
                step = grad * (self.gamma * parameter.norm() / grad.norm().clamp(min=1e-20))
                # after an overflow the update is skipped, but the statistics of batch norm would keep a NaN
                parameter.add_(torch.nan_to_num(step, nan=0.0, posinf=0.0, neginf=0.0))
        tape.rewind()
        # autocast keeps the weights that it has cast
        torch.clear_autocast_cache()
        try:
            loss = self.base.compute(context)
        except BaseException:
            self.after_backward()
            raise
        if loss is None:
            self.after_backward()  # there will be no backward pass
        return loss

    def after_backward(self) -> None:
        """Put the true weights back."""
        with torch.no_grad():
            for parameter, values in self._originals:
                parameter.copy_(values)
        if self._originals:
            torch.clear_autocast_cache()
        self._originals = []
        super().after_backward()


def _movable(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if p.requires_grad and p.dim() > 1 and "weight" in name]
