"""Inputs of a model in whatever containers: their tensors, their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["mapped", "num_rows", "tensors_in", "with_rows"]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, a tensor or mappings and sequences of them, in order."""
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if hasattr(value, "values") else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in tensors_in(entry)]


def mapped(value: Any, function: Callable[[Tensor], Any], otherwise: Callable[[Any], Any] = lambda entry: entry) -> Any:
    """Return ``value`` with ``function`` of every tensor in it, and ``otherwise`` of what is no container either."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(entry, function, otherwise) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [mapped(entry, function, otherwise) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return otherwise(value)


def num_rows(example: Any) -> int:
    """Return how many samples ``example`` has: the length of its first tensor that is no scalar."""
    return next((len(tensor) for tensor in tensors_in(example) if tensor.dim()), 1)


def with_rows(example: Any, number: int) -> Any:
    """Return ``example`` with ``number`` samples, those it has over and over."""
    rows = num_rows(example)

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != rows:
            return tensor
        return tensor[torch.arange(number, device=tensor.device) % rows]

    return mapped(example, resized)
