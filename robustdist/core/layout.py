"""Memory order of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["channels_last_weights"]


@contextmanager
def channels_last_weights(module: nn.Module) -> Iterator[None]:
    """Hold the four-dimensional parameters of ``module`` in channels-last order inside the context.

    Values and parameter objects stay the same, so optimisers and wrappers made inside the context keep working.
    Parameters that were in channels-last order before stay in it afterwards.
    """
    moved: list[nn.Parameter] = []
    try:
        for parameter in module.parameters():
            if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last):
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
                moved.append(parameter)
        yield
    finally:
        for parameter in moved:
            parameter.data = parameter.data.contiguous()
