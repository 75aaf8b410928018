"""Copies of a model to try things on, without disturbing anything around it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from robustdist.core.compiled import uncompiled
from robustdist.core.guard import ordinary_tensors

__all__ = ["call", "spare_copy", "undisturbed"]


def spare_copy(module: nn.Module) -> nn.Module:
    """Return a copy in eval mode in which every floating-point parameter takes a gradient."""
    spare = copy.deepcopy(module).eval()
    for parameter in spare.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    return spare


def call(module: nn.Module, example: Any) -> Any:
    """Return the output of ``module``; entries of a dict are keyword arguments."""
    example = ordinary_tensors(example)  # of validation, where Lightning makes others
    return module(**example) if isinstance(example, dict) else module(example)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Allow gradients, whatever the caller does; keep random numbers and warnings to ourselves; compile nothing."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        uncompiled(),
    ):
        warnings.simplefilter("ignore")
        yield
