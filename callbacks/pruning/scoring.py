"""What a criterion sees of every step: gradients of weights, and of gates on whole layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist._lightning import Trainer
from robustdist.pruning.gates import Gates
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.importance import Criterion
from robustdist.pruning.projections import is_below

__all__ = ["Scoring", "reduced_gradients"]


def reduced_gradients(trainer: Trainer, gates: Gates) -> dict[str, Tensor]:
    """Take the gates' gradients, their mean over the ranks, in the scale of the loss. A collective."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    taken = gates.gradients(lambda row: trainer.strategy.reduce(row, reduce_op="mean"))
    return {name: gradient / scale for name, gradient in taken.items()}


class Scoring:
    """Shows a criterion every step, until the units are removed.

    Args:
        criterion: One that needs gradients.
        module: The dense module; its layers get gates at 1, through which they compute what they did.
        groups: Groups of its units.
        tensors: As from :func:`robustdist.pruning.importance.named_tensors`.
    """

    def __init__(
        self, criterion: Criterion, module: nn.Module, groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]
    ) -> None:
        self._criterion, self._groups, self._tensors = criterion, groups, tensors
        self._gates = Gates(module, [group for group in groups if group.layers]).install()

    def before_step(self, trainer: Trainer, optimizer: Any) -> None:
        """Score units by the reduced gradients of this step, if they are finite."""
        groups = [group for group in self._groups if self._is_read(group, optimizer)]
        tensors = dict(self._tensors)
        if any(group.layers for group in groups):
            for name, gradient in reduced_gradients(trainer, self._gates).items():
                tensors[name] = torch.ones_like(gradient)
                tensors[name].grad = gradient
        gates = [tensors[group.name].grad for group in groups if group.layers]
        if _all_finite([*gates, *(p.grad for part in optimizer.param_groups for p in part["params"])]):
            self._criterion.observe(groups, tensors)

    def close(self) -> None:
        """Take the gates away."""
        self._gates.remove()

    def _is_read(self, group: UnitGroup, optimizer: Any) -> bool:
        """Whether ``optimizer`` holds something that reads the units, or is in the layers."""
        held = {id(parameter) for part in optimizer.param_groups for parameter in part["params"]}
        inside = (t for name, t in self._tensors.items() if any(is_below(name, path) for path in group.layers))
        readers = inside if group.layers else (self._tensors[member.tensor] for member in group.consumers)
        return any(id(tensor) in held for tensor in readers)


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
