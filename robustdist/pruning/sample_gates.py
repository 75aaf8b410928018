"""Gate gradients of every sample by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.compiled import compiled_part
from robustdist.errors import UsageError
from robustdist.pruning.attention import slim
from robustdist.pruning.gate_hooks import GateHooks
from robustdist.pruning.groups import UnitGroup

__all__ = ["SampleGates"]

_REMEDY = "leave per_sample out of method_options"


class SampleGates(GateHooks):
    r"""Gates at 1, one per sample and unit: :math:`\partial L / \partial g_{nk}`.

    Nothing is multiplied in the forward pass. The gradient is the product of each reader's input and its gradient,
    summed over positions; a backward pass that asks for no parameters, as that of an attack, does not compute it. Of
    several passes over a batch (clean and attacked) gradients add up by sample, as they do in the loss.

    Args:
        module: The dense module. Attention of torch's own class gets one that calls its output layer, until ``remove``.
        groups: Groups of units of ``module``, none of layers.

    Raises:
        UsageError: If parts of ``module`` are compiled, or a group is one of layers.
    """

    def __init__(self, module: nn.Module, groups: Sequence[UnitGroup]) -> None:
        if compiled_part(module) is not None:
            raise UsageError(f"per_sample=True does not go with compiled parts: {_REMEDY}")
        if any(group.layers for group in groups):
            raise UsageError(f"per_sample=True knows nothing of whole layers: {_REMEDY}, or layers out of the target")
        super().__init__(module, groups)
        self._undo: list[Callable[[], Any]] = []
        self._calls: list[tuple[str, Tensor, Tensor]] = []

    def install(self) -> SampleGates:
        """Put the gates in front of the layers; once."""
        for path in () if self.installed else dict.fromkeys(path for group in self._groups for path in group.swaps):
            self._undo.append(slim(self._module.get_submodule(path)))
        super().install()
        return self

    def remove(self) -> None:
        """Take the gates away."""
        super().remove()
        while self._undo:
            self._undo.pop()()
        self._calls = []

    def multiplied(self, x: Tensor, group: str, units: Tensor, axis: int) -> Tensor:
        """Return ``x`` with a gate that is 1."""
        if not torch.is_grad_enabled() or x.dim() < 2:
            return x
        dtype = torch.promote_types(x.dtype, torch.float32)
        values = torch.zeros(len(x), len(units), dtype=dtype, device=x.device, requires_grad=True)
        self._calls.append((group, units, values))
        result: Tensor = _Gated.apply(x, values, x.dim() + axis)
        return result

    def take(self, num_samples: int) -> dict[str, Tensor]:
        """Take the gradients of one batch, in the scale of the loss, and start anew.

        Args:
            num_samples: Samples of the batch.

        Returns:
            Name of a group -> shape (num_samples, size), float64, on the CPU; groups without a backward pass are
            missing.

        Raises:
            UsageError: If a reader's first dimension is not that of the samples, or no forward pass called it.
        """
        self.check_reached()
        calls, self._calls = self._calls, []
        sizes = {group.name: group.size for group in self._groups}
        found: dict[str, Tensor] = {}
        for name, units, values in calls:
            if values.grad is None:
                continue
            if len(values) != num_samples:
                raise UsageError(
                    f"per_sample=True: what reads group {name} is called with {len(values)} rows for {num_samples} "
                    f"samples, so that rows are no samples: {_REMEDY}"
                )
            total = found.setdefault(name, torch.zeros(num_samples, sizes[name] + 1, dtype=torch.float64))
            # index -1, no unit of this group, is the last column
            total.index_add_(1, units.cpu() % (sizes[name] + 1), values.grad.double().cpu())
        return {name: total[:, :-1] for name, total in found.items()}


class _Gated(torch.autograd.Function):
    """x, with a gradient for multipliers 1 of shape (rows, entries along an axis)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, axis: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        (x,) = ctx.saved_tensors
        rest = [dim for dim in range(1, x.dim()) if dim != ctx.axis]
        product = gradient * x
        return gradient, product.sum(rest) if rest else product, None
