"""What an optimiser remembers follows its parameters through surgery."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from robustdist.pruning.recipe import PruningRecipe

__all__ = ["optimizers_follow"]


@torch.no_grad()
def optimizers_follow(
    optimizers: Iterable[Optimizer], module: nn.Module, recipe: PruningRecipe, dense_shapes: dict[str, torch.Size]
) -> list[str]:
    """Slice the state of ``optimizers`` after ``recipe`` was applied to ``module``.

    Moments of a parameter's dense shape are cut like the parameter, step counts stay. State of another shape, such as
    factored second moments, cannot be cut exactly: the parameter starts with fresh state. Parameters of dropped layers
    leave their groups. Groups, learning rates and schedulers stay as they are.

    Args:
        optimizers: Any of ``torch.optim``, or with the same per-parameter state.
        module: The small module; its parameters are the objects the optimisers hold.
        recipe: What was done to it.
        dense_shapes: Parameter name -> shape before the surgery.

    Returns:
        Names of the parameters whose state was reset.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    reset = []
    for optimizer in optimizers:
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in [parameter for parameter in held if parameter in names]:
            state = optimizer.state.get(parameter)
            if state and not _follow(state, names[parameter], recipe, dense_shapes):
                del optimizer.state[parameter]
                reset.append(names[parameter])
        if recipe.dropped_layers:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in names]
            for parameter in held - set(names):
                optimizer.state.pop(parameter, None)
    return sorted(reset)


def _follow(state: dict[str, object], name: str, recipe: PruningRecipe, dense_shapes: dict[str, torch.Size]) -> bool:
    """Cut the tensors of ``state`` in place; False if one of them cannot be cut."""
    if not any(cut.tensor == recipe.aliases.get(name, name) for cut in recipe.cuts):
        return True
    for key, value in list(state.items()):
        if isinstance(value, Tensor) and value.dim():
            sliced = recipe.slice_like(name, value) if value.shape == dense_shapes[name] else None
            if sliced is None:
                return False
            state[key] = sliced
    return True
