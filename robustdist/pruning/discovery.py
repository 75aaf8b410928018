"""Which units of a model can be removed: found by both sources, and tried before anybody relies on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.pruning.depth import layer_groups, skip_layers, stream_into
from robustdist.pruning.example import tensors_in
from robustdist.pruning.groups import Kind, UnitGroup
from robustdist.pruning.hidden import norms_over_survivors
from robustdist.pruning.layers import DIRECT
from robustdist.pruning.masks import mask_units
from robustdist.pruning.recipe import compile_recipe
from robustdist.pruning.spare import call, spare_copy, undisturbed
from robustdist.pruning.tracing import traced_groups
from robustdist.pruning.transformers import transformer_groups

__all__ = ["check_groups", "check_layers", "discover"]

#: |masked - removed| over the largest output, above which a group is not what it says.
_TOLERANCE = 1e-4


def discover(
    module: nn.Module,
    example: Any = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    kinds: Collection[Kind] = ("channels", "heads", "ffn"),
    ignore: Sequence[str] = (),
    refused: dict[str, str] | None = None,
) -> list[UnitGroup]:
    """Return the groups of units that can be removed from ``module``, which is not touched.

    Transformers are found by their structure, channels of convolutional networks by tracing; a network that is both,
    such as a transformer behind a stem of convolutions, has groups of either source, of different tensors.

    With an example every group is tried on a copy: zeroing units must give what removing them gives. Groups that fail,
    because something else depends on them, are left out.

    Args:
        module: The dense module.
        example: A small input batch; needed for convolutional networks.
        forward: Maps (module, example) to the output; default ``module(example)``.
        kinds: What to look for. ``hidden``, the width of a residual stream, and ``layers``, whole blocks, are not
            looked for by default.
        ignore: Patterns of paths of parts that are left whole if they cannot be traced.
        refused: Path or group name -> why it cannot be pruned, filled.

    Raises:
        UsageError: If there is nothing that can be removed, or no layer where ``kinds`` asks for them.
    """
    notes: dict[str, str] = {} if refused is None else refused
    groups = transformer_groups(module, kinds=kinds, refused=notes)
    stacks = _stacks(module, example, forward or call) if "layers" in kinds else []
    convolutions = sum(isinstance(layer, DIRECT) for layer in module.modules())
    if "channels" in kinds and (not groups or convolutions > 1):  # one alone cuts an image into patches
        claimed = {member.tensor for group in groups for member in group.members}
        traced = traced_groups(module, example, forward=forward, ignore=ignore, refused=notes)
        traced = [group for group in traced if group.kind in kinds]
        groups += [group for group in traced if claimed.isdisjoint(member.tensor for member in group.members)]
    if example is not None:
        right = check_groups(module, groups, example, forward=forward)
        gone = {group.name for group in groups} - {group.name for group in right}
        notes.update(dict.fromkeys(sorted(gone), "something else depends on its units"))
        groups = right
    groups += stacks
    if not groups:
        reasons = "; ".join(f"{path or 'the model'}: {reason}" for path, reason in notes.items())
        raise UsageError(
            f"nothing in {type(module).__name__} can be removed ({reasons or 'no such layer was found'}): add to "
            f"kinds={sorted(kinds)}, or prune a model with layers whose units only layers that can lose them read"
        )
    return groups


def check_layers(
    module: nn.Module,
    layers: Sequence[str],
    example: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[str]:
    """Return those of the blocks ``layers`` that return what they are given first, changed but of its shape."""
    spare, right = spare_copy(module), dict.fromkeys(layers, False)

    def note(path: str, given: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        first = stream_into(tuple(given), kwargs)
        right[path] = isinstance(first, Tensor) and isinstance(out, Tensor) and first.shape == out.shape

    for path in layers:
        spare.get_submodule(path).register_forward_hook(
            lambda block, given, kwargs, out, path=path: note(path, given, kwargs, out), with_kwargs=True
        )
    with undisturbed(), torch.no_grad():
        (forward or call)(spare, example)
    return [path for path in layers if right[path]]


def _stacks(module: nn.Module, example: Any, run: Callable[[nn.Module, Any], Any]) -> list[UnitGroup]:
    """Return the groups of layers, those of no use to anybody alone locked after a trial on the example."""
    notes: dict[str, str] = {}
    stacks = layer_groups(module, notes)
    if example is not None:
        stacks = [group for group in (_tried(module, group, example, run, notes) for group in stacks) if group]
    if not stacks:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in notes.items()) or "no list of such blocks"
        raise UsageError(
            f"{type(module).__name__} has no layers that can go, which are blocks with attention and a feed-forward "
            f"part that return the stream alone ({reasons}): ask for width, params or macs in place of layers"
        )
    return stacks


def _tried(
    module: nn.Module, group: UnitGroup, example: Any, run: Callable[[nn.Module, Any], Any], notes: dict[str, str]
) -> UnitGroup | None:
    right = check_layers(module, group.layers, example, forward=run)
    changing = {unit for unit, path in enumerate(group.layers) if path not in right}
    notes.update({group.layers[unit]: "it returns something of another shape" for unit in changing - group.locked})
    every, locked = frozenset(range(group.size)), group.locked | changing

    def goes(units: Sequence[int]) -> bool:
        return _removal_is_right(module, [replace(group, locked=every.difference(units))], example, run)

    free = sorted(every - locked)
    if not (goes(free[:-1]) and goes(free[-1:])):  # a few trials where all is well
        held = {unit for unit in free if not goes([unit])}
        notes.update({group.layers[unit]: "the model does not run without it" for unit in held})
        locked |= held
    return replace(group, locked=locked) if len(locked) < group.size else None


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
    free = {group.name: [unit for unit in range(group.size) if unit not in group.locked] for group in groups}
    removed = {group.name: free[group.name][:: 1 if group.layers else 3][: group.size - 1] for group in groups}
    try:
        with undisturbed(), torch.no_grad():
            torch.manual_seed(0)
            masked = spare_copy(module)
            _unsettle(masked)
            small = spare_copy(masked)
            recipe = compile_recipe(small, groups, removed)
            mask_units(masked, groups, removed)
            norms_over_survivors(masked, recipe)
            skip_layers(masked, recipe.dropped_layers)
            recipe.apply(small)
            expected, found = tensors_in(run(masked, example)), tensors_in(run(small, example))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError):
        return False  # the small model does not run: something that depends on these units was not found
    return len(expected) == len(found) and all(map(_close, expected, found))


def _unsettle(module: nn.Module) -> None:
    """Give norms and biases values that show a permutation, which the initial 0 and 1 would hide."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.data = (0.75 + 0.5 * torch.rand(tensor.shape)).to(tensor)


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(expected, found)
    return bool((expected - found).abs().max() <= _TOLERANCE * expected.abs().max())
