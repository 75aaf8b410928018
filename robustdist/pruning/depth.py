"""Whole blocks as units: found, skipped while they are masked, and mixed with their input by a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from robustdist.pruning.attention import PassThrough
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.projections import join
from robustdist.pruning.transformers import droppable_layers

__all__ = ["BlockGate", "layer_groups", "skip_layers", "stream_into"]


def layer_groups(module: nn.Module, refused: dict[str, str] | None = None) -> list[UnitGroup]:
    """Return a group for every list of blocks some of which can go, see :func:`droppable_layers`.

    All blocks of a list are units of its group, so that widths count what the model has; those that have to stay are
    locked.

    Args:
        module: Any module; blocks dropped before are no units.
        refused: Path of a block -> why it has to stay, filled for lists of which no block can go.

    Example:
        >>> stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
        >>> [(group.name, group.layers, sorted(group.locked)) for group in layer_groups(stack)]
        [('layers', ('layers.0', 'layers.1', 'layers.2'), [0])]
    """
    notes: dict[str, str] = {}
    free = droppable_layers(module, notes)
    groups = []
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in [*free, *notes]):
        children = module.get_submodule(parent).named_children()
        paths = [join(parent, name) for name, child in children if not isinstance(child, PassThrough)]
        locked = frozenset(unit for unit, path in enumerate(paths) if path not in free)
        if len(locked) < len(paths):
            groups.append(UnitGroup(parent or "layers", "layers", len(paths), (), locked=locked, layers=tuple(paths)))
        elif refused is not None:
            refused.update({path: notes[path] for path in paths if path in notes})
    return groups


def stream_into(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a block is given first, by position or, if there is nothing, by keyword."""
    return next(iter([*args, *kwargs.values()]), None)


def _mixed(x: Tensor, out: Tensor, value: Tensor) -> Tensor:
    """Return ``out`` for 1 and ``x`` for 0, exactly."""
    dtype = torch.promote_types(x.dtype, out.dtype)
    return torch.lerp(x.to(dtype), out.to(dtype), value.to(out.device, dtype))


def skip_layers(module: nn.Module, layers: Iterable[str]) -> list[RemovableHandle]:
    """Let blocks return what they are given, as if they had been dropped.

    They still run, and their parameters have gradients, zeros: DDP waits for them.

    Returns:
        Handles; ``remove()`` on each ends it.
    """

    def skipped(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        return _mixed(stream_into(args, kwargs), out, out.new_zeros(()))

    return [module.get_submodule(path).register_forward_hook(skipped, with_kwargs=True) for path in layers]


class BlockGate:
    r"""Forward hook of one block f: what follows gets :math:`x + g \, (f(x) - x)`, with the block's value g.

    So the derivative by g at 1 is :math:`\langle f(x) - x, \partial L / \partial f(x) \rangle`, for a block of residual
    branches that of a multiplier on all they add to the stream.

    While parameters that were trained are frozen, as in an attack that runs backward passes, g collects no gradient.

    Args:
        value: Returns g, a scalar, or ``None`` where the gate is out of effect.
        block: The block.
    """

    def __init__(self, value: Callable[[], Tensor | None], block: nn.Module) -> None:
        self.value, self._trained = value, _is_trained(block)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockGate:
        return self

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        """Return what follows gets; ``None``: what the block returns."""
        value = self.value()
        if value is None:
            return None
        frozen = self._trained and not _is_trained(block)
        return _mixed(stream_into(args, kwargs), out, value.detach() if frozen else value)


def _is_trained(block: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in block.parameters())
