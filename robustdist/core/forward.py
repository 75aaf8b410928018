"""Which function of a module gives the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from robustdist.core.guard import pure
from robustdist.errors import UsageError

__all__ = [
    "AttackPrecision",
    "Forward",
    "as_logits",
    "bind_forward",
    "captured_logits",
    "guarded_logits",
    "looks_like_probabilities",
    "precision_context",
]

#: None (the module itself), the path of a sub-module, or a function (module, x, batch) -> output.
Forward: TypeAlias = str | Callable[[Any, Tensor, Any], Any] | None
AttackPrecision: TypeAlias = Literal["inherit", "bf16", "32"]


def bind_forward(module: nn.Module, forward: Forward, batch: Any) -> Callable[[Tensor], Any]:
    """Return the function of the input alone that ``forward`` names.

    Raises:
        UsageError: If ``forward`` names no sub-module.
    """
    if forward is None:
        return module
    if isinstance(forward, str):
        try:
            return module.get_submodule(forward)
        except AttributeError:
            children = ", ".join(name for name, _ in module.named_children())
            raise UsageError(
                f"forward={forward!r} is no sub-module of {type(module).__name__}: it has {children}"
            ) from None
    function = forward
    return lambda x: function(module, x, batch)


def precision_context(precision: AttackPrecision, device: torch.device) -> Any:
    """Return the context in which an attack runs its forward passes: the caller's, bfloat16 or full precision."""
    if precision == "inherit":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def as_logits(output: Any) -> Tensor:
    """Take the logits out of a model's output: a tensor, or an object or mapping with ``logits``.

    Raises:
        UsageError: If there are none.
    """
    found = output
    if not isinstance(found, Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise UsageError(
            f"the model returned {type(output).__name__}, not logits: "
            "name a sub-module that returns them with the option forward, or pass a function forward(module, x, batch)"
        )
    return found


@contextmanager
def captured_logits(module: nn.Module, forward: Forward, is_input: Callable[[Any], bool]) -> Iterator[list[Tensor]]:
    """Collect the logits that the named part of ``module`` returns inside the context for the input that is meant.

    A call on another tensor, an augmented one say, is not collected, nor one without a graph; neither is a function
    given as ``forward``.
    """
    seen: list[Tensor] = []
    if callable(forward) and not isinstance(forward, nn.Module):
        yield seen
        return

    def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and is_input(args[0]) and torch.is_grad_enabled():
            seen.append(as_logits(output))

    part = module if forward is None else module.get_submodule(str(forward))
    handle = part.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def guarded_logits(
    module: nn.Module,
    forward: Callable[[Tensor], Any],
    x: Tensor,
    mode: Literal["eval", "train"] = "eval",
    *,
    seed: int = 0,
) -> Tensor:
    """Return the logits of ``x`` without a graph, leaving ``module`` as it was; ``seed`` drives a random forward."""
    with pure(module, mode, x.device, seed), torch.no_grad():
        return as_logits(forward(x))


def looks_like_probabilities(logits: Tensor) -> bool:
    """Return whether every row is non-negative and sums to 1, as softmax outputs do and logits do not."""
    if logits.dim() != 2 or logits.shape[1] < 2 or len(logits) == 0:
        return False
    rows = logits.detach().float()
    # probabilities in bfloat16 sum to 1 within the rounding of each of them
    tolerance = max(1e-3, torch.finfo(logits.dtype).eps) if logits.is_floating_point() else 1e-3
    return bool((rows >= 0).all() and (rows.sum(1) - 1).abs().max() < tolerance)
