"""Leave a module and the global random states exactly as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from robustdist.core.strided import strided_pointwise

__all__ = [
    "forked_rng",
    "frozen_parameters",
    "module_mode",
    "ordinary_attributes",
    "ordinary_tensors",
    "pure",
    "rewindable_rng",
    "unchanged_buffers",
]


@contextmanager
def module_mode(module: nn.Module, mode: Literal["eval", "train"]) -> Iterator[None]:
    """Switch ``module`` to ``mode`` and restore the flag of every sub-module afterwards.

    ``module.train(flag)`` would flatten the flags of sub-modules the user froze on purpose. Mode "train" therefore
    leaves all flags as they are: the attack then sees the model as the training step does. Only flags are written,
    ``module.eval()`` is never called: an override of it may do more, such as merging low-rank weights.
    """
    flags = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        if mode == "eval":
            for submodule, _ in flags:
                submodule.training = False
        yield
    finally:
        for submodule, flag in flags:
            submodule.training = flag


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Let copies stand in for all buffers of ``module`` and put the originals back afterwards.

    The originals are neither compared nor written: a graph built before the attack may have saved them. A buffer
    registered as None becomes None again. One that a forward registers for the first time stays.
    """
    saved = [(owner._buffers, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    # by identity: two names of one buffer stay one buffer
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in saved if buffer is not None}
    try:
        for store, name, buffer in saved:
            if buffer is not None:
                store[name] = copies[id(buffer)]
        yield
    finally:
        for store, name, buffer in saved:
            store[name] = buffer


def ordinary_tensors(value: Any) -> Any:
    """Return ``value`` with copies in the place of inference tensors, also inside tuples, lists and dictionaries.

    Autograd refuses a tensor that was made in inference mode. Anything else is returned as it is.
    """
    if isinstance(value, Tensor):
        if not value.is_inference():
            return value
        copy = value.detach().clone()
        return nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy
    if isinstance(value, (tuple, list)):
        items = [ordinary_tensors(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        replaced = {key: ordinary_tensors(item) for key, item in value.items()}
        return value if all(replaced[key] is item for key, item in value.items()) else replaced
    return value


@contextmanager
def ordinary_attributes(module: nn.Module) -> Iterator[None]:
    """Put copies in the place of the inference tensors that ``module`` holds; put the originals back afterwards.

    A forward in Lightning's evaluation loops may have cached them in attributes (tables of positions, masks), and a
    module built there has inference tensors for weights. Lists are left alone: users collect results in them.
    """
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
    try:
        for owner in module.modules():
            attributes = vars(owner)
            for store in (attributes, *(value for value in attributes.values() if isinstance(value, dict))):
                for name, value in store.items():
                    copy = ordinary_tensors(value) if isinstance(value, (Tensor, tuple)) else value
                    if copy is not value:
                        replaced.append((store, name, value, copy))
        for store, name, _, copy in replaced:
            store[name] = copy
        yield
    finally:
        for store, name, value, copy in replaced:
            # a forward may have computed a new one meanwhile, for another shape say
            if store.get(name) is copy:
                store[name] = value


@contextmanager
def forked_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Give the code inside its own global random streams (torch, ``random``, numpy) and restore them afterwards."""
    accelerated = device.type not in ("cpu", "meta")
    backend = torch.get_device_module(device.type) if accelerated else None
    devices = [backend.current_device() if device.index is None else device.index] if backend is not None else []
    kwargs = {"device_type": device.type} if accelerated else {}
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices, **kwargs):
        torch.default_generator.manual_seed(seed)
        if backend is not None:
            with backend.device(devices[0]):  # manual_seed seeds the current device, which may be another one
                backend.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def rewindable_rng(device: torch.device) -> Callable[[], None]:
    """Return a function that puts torch's global random states, of the CPU and of ``device``, back to those of now."""
    state = torch.get_rng_state()
    if device.type in ("cpu", "meta"):
        return lambda: torch.set_rng_state(state)
    backend = torch.get_device_module(device.type)
    device_state = backend.get_rng_state(device)

    def rewind() -> None:
        torch.set_rng_state(state)
        backend.set_rng_state(device_state, device)

    return rewind


@contextmanager
def frozen_parameters(module: nn.Module) -> Iterator[None]:
    """Switch ``requires_grad`` off for all parameters and set ``.grad`` aside; restore both afterwards.

    For foreign code that calls ``backward()``: nothing then reaches the weights, so neither gradient accumulation
    nor DDP's reducer sees the attack.
    """
    saved = [
        (parameter, parameter.requires_grad, parameter.grad)
        for parameter in module.parameters()
        if not parameter.is_inference()  # takes no gradient, and its flag cannot be set outside inference mode
    ]
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
        ordinary_attributes(module),
        unchanged_buffers(module),
        forked_rng(device, seed),
        strided_pointwise(module, device),
        _differentiable_rnns(module, device),
    ):
        yield


def _differentiable_rnns(module: nn.Module, device: torch.device) -> Any:
    """Switch cuDNN off where it would refuse the backward pass of a recurrent layer in eval mode."""
    recurrent = device.type == "cuda" and any(isinstance(part, nn.RNNBase) for part in module.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
