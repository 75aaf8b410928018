"""A small input out of the user's batch, for finding groups and counting costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.batch import BatchAdapter
from robustdist.core.forward import Forward, bind_forward
from robustdist.errors import UsageError

__all__ = ["example_of", "forward_of", "num_rows", "with_rows"]

#: Samples are not needed for structure; two, because batch norms of one sample per channel refuse in train mode.
_ROWS = 2


def example_of(module: nn.Module, batch: Any, input_key: str | int | None) -> Any:
    """Return what the module's forward is called with: two samples of ``batch``.

    Batches of floating-point inputs are taken apart as for attacks; others, such as token ids with a mask, are kept
    whole.
    """
    try:
        located = BatchAdapter(input_key).locate(batch)
    except UsageError:
        if input_key is not None:
            raise
        return _first_rows(batch)
    return located.x[:_ROWS].detach()


def forward_of(forward: Forward) -> Callable[[nn.Module, Any], Any]:
    """Return the function (module, example) -> output that ``forward`` names.

    Of a batch that is no tensor, the model gets what its forward has parameters for: entries of a mapping by name,
    those of a sequence in order.
    """

    def run(module: nn.Module, example: Any) -> Any:
        function = bind_forward(module, forward, example)
        if isinstance(example, Tensor) or not isinstance(function, nn.Module):
            return function(example)
        names = _parameters(function)
        if isinstance(example, Mapping):
            return function(**{key: value for key, value in example.items() if names is None or key in names})
        entries = list(example) if isinstance(example, (list, tuple)) else [example]
        return function(*entries[: len(entries) if names is None else len(names)])

    return run


def num_rows(example: Any) -> int:
    """Return how many samples ``example`` has."""
    return next((len(tensor) for tensor in _tensors(example) if tensor.dim()), 1)


def with_rows(example: Any, number: int) -> Any:
    """Return ``example`` with ``number`` samples, those it has over and over."""
    rows = num_rows(example)
    return _mapped(
        example,
        lambda tensor: (
            tensor[torch.arange(number, device=tensor.device) % rows]
            if tensor.dim() and len(tensor) == rows
            else tensor
        ),
    )


def _parameters(module: nn.Module) -> list[str] | None:
    """Names of what ``module.forward`` takes by position; None if it takes anything."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _first_rows(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor[:_ROWS].detach() if tensor.dim() else tensor)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``function`` of every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(entry, function) for entry in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]
