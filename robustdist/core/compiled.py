"""Whether torch.compile had its hands on a module, and compiled code that is never compiled twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError

__all__ = [
    "CompiledForward",
    "check_copies_are_their_own",
    "check_double_backward",
    "compiled_part",
    "forget_compiled",
    "uncompiled",
]

_METHODS = ("forward", "training_step")


def compiled_part(module: nn.Module) -> str | None:
    """Return the name of the first compiled part of ``module`` ("" for itself), or None.

    Seen are ``torch.compile(part)``, ``part.compile()``, a decorated ``forward`` and a compiled LightningModule.
    """
    name: str
    for name, part in module.named_modules():
        methods = (getattr(part, method, None) for method in _METHODS)
        if getattr(part, "_compiled_call_impl", None) is not None or any(
            hasattr(method, "_torchdynamo_orig_callable") for method in methods
        ):
            return name
    return None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as they were written: for graphs to follow, hooks to see, and copies not worth compiling."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled; importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def forget_compiled(module: nn.Module) -> None:
    """Compile anew at the next call, if a part of ``module`` is compiled: code does not notice that hooks changed."""
    if compiled_part(module) is not None:
        torch.compiler.reset()


def check_copies_are_their_own(module: nn.Module, option: str) -> None:
    """Refuse modules whose copies would run the original: a compiled method on the instance is bound to it.

    ``torch.compile(part)`` and ``part.compile()`` are no such methods.

    Raises:
        UsageError: Naming ``option`` and the part.
    """
    for name, part in module.named_modules():
        if hasattr(part, "_orig_mod"):  # torch's wrapper, whose copies wrap copies
            continue
        if any(hasattr(vars(part).get(method), "_torchdynamo_orig_callable") for method in _METHODS):
            what = f"methods of its part {name!r}" if name else "methods of the module"
            raise UsageError(
                f"{option} tries things on copies, but {what} were compiled, which stay with the original: give fit "
                "the module itself and compile what is inside it, self.net.compile() in __init__ for example"
            )


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
