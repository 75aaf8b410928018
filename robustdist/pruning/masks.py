"""Masked training: removed units at zero in every tensor of their group, until they are really cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.recipe import PruningRecipe

__all__ = ["UnitMasks", "mask_units"]


class UnitMasks:
    """Which entries of which tensors are held at zero.

    Weights, gradients and moments of removed units are zero at every step, in the layers that make them and in those
    that read them, so training goes on as if they had been cut: the small network would take the same steps.

    Args:
        module: The dense module.
        recipe: What is to be removed.
    """

    def __init__(self, module: nn.Module, recipe: PruningRecipe) -> None:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._masks: list[tuple[Tensor, list[tuple[int, Tensor]]]] = []
        places: dict[str, list[tuple[int, Tensor]]] = {}
        for cut in recipe.cuts:
            gone = (~torch.tensor(cut.keep)).nonzero().flatten().to(tensors[cut.tensor].device)
            places.setdefault(cut.tensor, []).append((cut.dim, gone))
        for name, gone_places in places.items():
            if _statistics(name):
                continue  # a variance of zero is no mask; nobody reads these channels
            self._masks.append((tensors[name], gone_places))

    @torch.no_grad()
    def apply(self) -> None:
        """Zero the weights of removed units."""
        for tensor, places in self._masks:
            _zero(tensor.data, places)

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Zero their gradients, before these are clipped."""
        for tensor, places in self._masks:
            if tensor.grad is not None:
                _zero(tensor.grad, places)

    @torch.no_grad()
    def apply_to_moments(self, optimizers: Iterable[Optimizer]) -> None:
        """Zero what optimisers remember of them."""
        for optimizer in optimizers:
            for tensor, places in self._masks:
                for value in optimizer.state.get(tensor, {}).values():
                    if isinstance(value, Tensor) and value.shape == tensor.shape:
                        _zero(value, places)


def mask_units(module: nn.Module, groups: Iterable[UnitGroup], removed: Mapping[str, Sequence[int]]) -> None:
    """Zero units of ``module`` in place, everywhere in their groups."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for group in groups:
            for member, keep in group.kept(removed.get(group.name, ())):
                if member.tensor in tensors and not bool(keep.all()) and not _statistics(member.tensor):
                    tensor = tensors[member.tensor]
                    _zero(tensor.data, [(member.dim, (~keep).nonzero().flatten().to(tensor.device))])


def _zero(tensor: Tensor, places: Sequence[tuple[int, Tensor]]) -> None:
    for dim, gone in places:
        tensor.index_fill_(dim, gone, 0)


def _statistics(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")
