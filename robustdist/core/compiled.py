"""Whether torch.compile had its hands on a module, and compiled code that is never compiled twice."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError

__all__ = ["CompiledForward", "check_double_backward", "compiled_part"]


def compiled_part(module: nn.Module) -> str | None:
    """Return the name of the first compiled part of ``module`` ("" for itself), or None.

    Seen are ``torch.compile(part)``, ``part.compile()``, a decorated ``forward`` and a compiled LightningModule.
    """
    name: str
    for name, part in module.named_modules():
        methods = (getattr(part, method, None) for method in ("forward", "training_step"))
        if getattr(part, "_compiled_call_impl", None) is not None or any(
            hasattr(method, "_torchdynamo_orig_callable") for method in methods
        ):
            return name
    return None


def check_double_backward(module: nn.Module, option: str) -> None:
    """Refuse modules whose backward pass is compiled, for it has no derivative of its own.

    Args:
        module: The module that will be differentiated twice.
        option: The option to name in the message, for example "objective=FastBAT".

    Raises:
        UsageError: If a part of ``module`` is compiled or compiled autograd is on.
    """
    part = compiled_part(module)
    remedy = "leave the module uncompiled, or choose an objective that differentiates once (PGDAT)"
    if part is not None:
        what = f"its part {part!r}" if part else "the module"
        raise UsageError(f"{option} differentiates twice, but {what} is compiled: {remedy}")
    # where nobody has imported it, nobody has switched it on
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled_autograd, "compiled_autograd_enabled", False):
        raise UsageError(f"{option} differentiates twice, but compiled autograd is on: {remedy}")


class CompiledForward:
    """The forward of ``part``, compiled for inputs of the first shape and type that come with gradients enabled.

    Anything else, the smaller last batch of an epoch say, runs uncompiled: one more compilation would take longer than
    it ever saves.
    """

    def __init__(self, part: nn.Module) -> None:
        self._eager = part.forward
        self._compiled = torch.compile(part.forward, dynamic=False)
        self._form: tuple[Any, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        form = tuple((value.shape, value.dtype, value.device, value.stride()) for value in tensors)
        if self._form is None and torch.is_grad_enabled():
            self._form = form
        usable = form == self._form and torch.is_grad_enabled()
        return (self._compiled if usable else self._eager)(*args, **kwargs)
