"""Weights and optimiser states of one moment, kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["on_cpu", "restore_snapshot", "take_snapshot"]


def on_cpu(value: Any) -> Any:
    """Return ``value`` with copies on the CPU in the place of all tensors, also inside lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, (list, tuple)) else value


def take_snapshot(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return copies on the CPU of all parameters and buffers of ``module`` and of the state of ``optimizers``.

    With Adam that is three times the size of the weights. Holds tensors and plain types only.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    return {
        "tensors": {name: on_cpu(tensor) for name, tensor in tensors},
        "optimizers": [on_cpu(optimizer.state_dict()["state"]) for optimizer in optimizers],
    }


def restore_snapshot(snapshot: dict[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Write a snapshot back, in place; gradients are dropped.

    Options of the optimisers, such as the learning rate, stay as they are: a schedule goes on where it is.
    """
    with torch.no_grad():
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            tensor.copy_(snapshot["tensors"][name])
    for optimizer, state in zip(optimizers, snapshot["optimizers"], strict=True):
        optimizer.load_state_dict({"state": on_cpu(state), "param_groups": optimizer.state_dict()["param_groups"]})
        optimizer.zero_grad()
