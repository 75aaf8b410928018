"""Leave a module and the global random states exactly as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["forked_rng", "frozen_parameters", "module_mode", "pure", "unchanged_buffers"]


@contextmanager
def module_mode(module: nn.Module, mode: Literal["eval", "train"]) -> Iterator[None]:
    """Switch ``module`` to ``mode`` and restore the flag of every sub-module afterwards.

    ``module.train(flag)`` would flatten the flags of sub-modules the user froze on purpose. Mode "train" therefore
    leaves all flags as they are: the attack then sees the model as the training step does.
    """
    flags = [(submodule, submodule.training) for submodule in module.modules()]
    if mode == "eval":
        module.eval()
    try:
        yield
    finally:
        for submodule, flag in flags:
            submodule.training = flag


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore every buffer of ``module``: its values, and the tensor object itself where a forward replaced it."""
    saved: list[tuple[nn.Module, str, Tensor, Tensor]] = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in saved:
                owner._buffers[name] = buffer
                # compared by value: batch norm updates its statistics without touching their version counter
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


@contextmanager
def forked_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Give the code inside its own global random streams (torch, ``random``, numpy) and restore them afterwards."""
    accelerated = device.type not in ("cpu", "meta")
    devices = [device.index or 0] if accelerated else []
    kwargs = {"device_type": device.type} if accelerated else {}
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices, **kwargs):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            torch.get_device_module(device.type).manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def frozen_parameters(module: nn.Module) -> Iterator[None]:
    """Switch ``requires_grad`` off for all parameters and set ``.grad`` aside; restore both afterwards.

    For foreign code that calls ``backward()``: nothing then reaches the weights, so neither gradient accumulation
    nor DDP's reducer sees the attack.
    """
    saved = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _, _ in saved:
            parameter.grad = None
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag, grad in saved:
            parameter.requires_grad_(flag)
            parameter.grad = grad


@contextmanager
def pure(module: nn.Module, mode: Literal["eval", "train"], device: torch.device, seed: int) -> Iterator[None]:
    """All of the above that an attack needs, with gradients enabled in whatever context the caller is.

    ``enable_grad`` alone does not undo inference mode, which Lightning uses in ``validate`` and ``test``.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        module_mode(module, mode),
        unchanged_buffers(module),
        forked_rng(device, seed),
    ):
        yield
