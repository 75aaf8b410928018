"""Whether torch.compile had its hands on a module."""

from __future__ import annotations

import sys

from torch import nn

from robustdist.errors import UsageError

__all__ = ["check_double_backward", "compiled_part"]


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
