"""What can be found out about a forward pass by running it: is it deterministic, does it differentiate inside?"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robustdist.core.forward import guarded_logits
from robustdist.core.guard import pure

__all__ = ["Repeated", "calls_autograd", "repeat_forward"]

#: Forward passes of one batch that have to agree.
NUM_FORWARDS = 5


class Repeated(NamedTuple):
    """How far repeated forward passes of one batch are apart.

    Attributes:
        spread: Largest difference between a logit and the same logit of the first pass, relative to the largest
            magnitude of all logits; infinite where one of them is not finite.
        num_changed: Predictions that are not the same in all passes.
    """

    spread: float
    num_changed: int


def repeat_forward(
    module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor, times: int = NUM_FORWARDS
) -> Repeated:
    """Run the same batch ``times`` times, each with other global random numbers; ``module`` stays as it was.

    Args:
        module: The module behind ``forward``.
        forward: Maps inputs to logits.
        x: Inputs, shape (batch, ...).
        times: Number of passes.
    """
    first = guarded_logits(module, forward, x)
    scale = float(first.abs().max()) if first.numel() else 0.0
    spread, changed = 0.0, torch.zeros(len(x), dtype=torch.bool, device=first.device)
    for seed in range(1, times):
        # another seed: with the same one even a forward that draws random numbers would repeat itself
        again = guarded_logits(module, forward, x, seed=seed)
        changed |= again.argmax(1) != first.argmax(1)
        if not torch.equal(again, first):
            difference = float((again - first).abs().max()) / (scale or 1.0)
            spread = max(spread, difference if difference < float("inf") else float("inf"))
    return Repeated(spread, int(changed.sum()))


def calls_autograd(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Return whether ``forward`` differentiates something itself, as defences do that optimise at inference.

    Seen are ``backward`` and ``autograd.grad`` and what is built on them; code that runs outside of Python is not.
    """
    watched = {inspect.unwrap(function).__code__ for function in (torch.autograd.grad, torch.autograd.backward)}
    seen = False

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        seen = seen or (event == "call" and frame.f_code in watched)

    before = sys.getprofile()
    with pure(module, "eval", x.device, 0):
        sys.setprofile(watch)
        try:
            forward(x.detach().clone())
        finally:
            sys.setprofile(before)
    return seen
