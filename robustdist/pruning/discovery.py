"""Which units of a model can be removed: found by both sources, and tried before anybody relies on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.masks import mask_units
from robustdist.pruning.recipe import compile_recipe
from robustdist.pruning.spare import call, spare_copy, undisturbed
from robustdist.pruning.tracing import traced_groups

__all__ = ["check_groups", "discover"]

#: |masked - removed| over the largest output, above which a group is not what it says.
_TOLERANCE = 1e-4


def discover(
    module: nn.Module,
    example: Any = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[UnitGroup]:
    """Return the groups of units that can be removed from ``module``, which is not touched.

    Every group is tried on a copy: zeroing units must give what removing them gives. Groups that fail, because
    something else depends on them, are left out.

    Args:
        module: The dense module.
        example: A small input batch; needed for convolutional networks.
        forward: Maps (module, example) to the output; default ``module(example)``.

    Raises:
        UsageError: If there is nothing that can be removed.
    """
    groups = check_groups(module, traced_groups(module, example, forward=forward), example, forward=forward)
    if not groups:
        raise UsageError(
            f"nothing in {type(module).__name__} can be removed: it has no layer inside whose channels only layers "
            "that can lose them depend on"
        )
    return groups


def check_groups(
    module: nn.Module,
    groups: Sequence[UnitGroup],
    example: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[UnitGroup]:
    """Return the groups for which masked equals removed on ``example``; all at once, one by one if that fails."""
    run = forward or call
    if _removal_is_right(module, groups, example, run):
        return list(groups)
    return [group for group in groups if _removal_is_right(module, [group], example, run)]


def _removal_is_right(
    module: nn.Module, groups: Sequence[UnitGroup], example: Any, run: Callable[[nn.Module, Any], Any]
) -> bool:
    removed = {group.name: list(range(0, group.size, 3))[: group.size - 1] for group in groups}
    try:
        with undisturbed(), torch.no_grad():
            torch.manual_seed(0)
            masked = spare_copy(module)
            _unsettle(masked)
            small = spare_copy(masked)
            mask_units(masked, groups, removed)
            compile_recipe(small, groups, removed).apply(small)
            expected, found = _outputs(run(masked, example)), _outputs(run(small, example))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError):
        return False  # the small model does not run: something that depends on these units was not found
    return len(expected) == len(found) and all(map(_close, expected, found))


def _unsettle(module: nn.Module) -> None:
    """Give norms and biases values that show a permutation, which the initial 0 and 1 would hide."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.data = (0.75 + 0.5 * torch.rand(tensor.shape)).to(tensor)


def _outputs(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in values for tensor in _outputs(value)]


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(expected, found)
    return bool((expected - found).abs().max() <= _TOLERANCE * expected.abs().max())
