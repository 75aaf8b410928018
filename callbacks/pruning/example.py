"""A small input out of the user's batch, for finding groups and counting costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from robustdist.core.batch import BatchAdapter
from robustdist.core.compiled import uncompiled
from robustdist.core.forward import Forward, bind_forward
from robustdist.errors import UsageError
from robustdist.pruning.example import with_rows

__all__ = ["arguments_of", "example_of", "forward_of"]

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
        return with_rows(batch, _ROWS)
    return with_rows(located.x, _ROWS)


def forward_of(forward: Forward) -> Callable[[nn.Module, Any], Any]:
    """Return the function (module, example) -> output that ``forward`` names.

    Of a batch that is no tensor, the model gets what its forward has parameters for: entries of a mapping by name,
    those of a sequence in order.
    """

    def run(module: nn.Module, example: Any) -> Any:
        function = bind_forward(module, forward, example)
        if not isinstance(function, nn.Module):
            return function(example)
        arguments = arguments_of(function, example)
        with uncompiled():
            return function(**arguments) if isinstance(arguments, Mapping) else function(*arguments)

    return run


def arguments_of(module: nn.Module, example: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Return what of ``example`` the module's forward has parameters for: a tuple by position or a dict by name."""
    names = None if isinstance(example, Tensor) else _parameters(module)
    if isinstance(example, Mapping):
        return {key: value for key, value in example.items() if names is None or key in names}
    entries = tuple(example) if isinstance(example, (list, tuple)) else (example,)
    return entries if names is None else entries[: len(names)]


def _parameters(module: nn.Module) -> list[str] | None:
    """Names of what ``module.forward`` takes by position; None if it takes anything."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]
