"""Cuts tensors, layers and classes of a module, and puts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.pruning.attention import PassThrough, slim

__all__ = ["UndoLog", "check_no_graph_is_held", "operate"]


class UndoLog:
    """What a module was before a recipe was applied to it. Holds the dense tensors until it is dropped."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def note(self, step: Callable[[], None]) -> None:
        """Add what takes one change back."""
        self._steps.append(step)

    def undo(self) -> None:
        """Put everything back, last change first; once."""
        while self._steps:
            self._steps.pop()()


def operate(
    module: nn.Module,
    *,
    swaps: Iterable[str] = (),
    dropped_layers: Iterable[str] = (),
    cuts: Iterable[tuple[str, int, Tensor]] = (),
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> UndoLog:
    """Change ``module`` in place, in the order of the arguments. If anything fails it is as it was.

    Args:
        module: The module.
        swaps: Paths of attention modules that get a class which can lack heads.
        dropped_layers: Paths of layers that let their input through from now on.
        cuts: Name of a parameter or buffer, dimension, and the indices that stay along it.
        attributes: Path of a sub-module to the values that attributes of it get.
    """
    log = UndoLog()
    try:
        _swap_classes(module, swaps, log)
        _drop_layers(module, dropped_layers, log)
        _cut_tensors(module, cuts, log)
        _set_attributes(module, attributes or {}, log)
    except BaseException:
        log.undo()
        raise
    return log


def check_no_graph_is_held(module: nn.Module) -> None:
    """Refuse parameters whose old shape a gradient graph of an earlier step still remembers.

    Raises:
        UsageError: Naming the parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            try:
                with torch.enable_grad():
                    torch.autograd.grad(parameter.reshape(-1)[0] * 1.0, parameter)
            except RuntimeError as error:
                raise UsageError(
                    f"{name} was pruned while a loss of an earlier step is still held with its graph: keep "
                    "loss.detach() instead, in the module and in callbacks"
                ) from error


def _swap_classes(module: nn.Module, swaps: Iterable[str], log: UndoLog) -> None:
    for path in swaps:
        log.note(slim(module.get_submodule(path)))


def _drop_layers(module: nn.Module, dropped: Iterable[str], log: UndoLog) -> None:
    for path in dropped:
        parent_path, _, name = path.rpartition(".")
        parent = module.get_submodule(parent_path)
        layer = parent.get_submodule(name)
        parent.add_module(name, PassThrough(layer))
        log.note(lambda parent=parent, name=name, layer=layer: parent.add_module(name, layer))  # type: ignore[misc]


def _cut_tensors(module: nn.Module, cuts: Iterable[tuple[str, int, Tensor]], log: UndoLog) -> None:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    by_tensor: dict[str, list[tuple[int, Tensor]]] = {}
    for name, dim, index in cuts:
        by_tensor.setdefault(name, []).append((dim, index))
    for name, places in by_tensor.items():
        tensor = tensors[name]
        dense, grad = tensor.data, tensor.grad
        tensor.grad = None  # its shape is checked against that of the data
        tensor.data = _kept(dense, places)
        tensor.grad = None if grad is None else _kept(grad, places)
        log.note(lambda tensor=tensor, dense=dense, grad=grad: _put_back(tensor, dense, grad))  # type: ignore[misc]


def _kept(tensor: Tensor, places: list[tuple[int, Tensor]]) -> Tensor:
    channels_last = (
        tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    for dim, index in places:
        tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last else tensor


def _put_back(tensor: Tensor, dense: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    tensor.data = dense
    tensor.grad = grad


def _set_attributes(module: nn.Module, attributes: Mapping[str, Mapping[str, Any]], log: UndoLog) -> None:
    for path, values in attributes.items():
        layer = module.get_submodule(path)
        for name, value in values.items():
            before: Any = getattr(layer, name)
            setattr(layer, name, value)
            log.note(lambda layer=layer, name=name, before=before: setattr(layer, name, before))  # type: ignore[misc]
