"""Memory order of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["channels_last_copies", "channels_last_weights"]

_CONVS = (nn.Conv2d, nn.ConvTranspose2d)


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


def channels_last_copies(
    module: nn.Module, in_place_of: Mapping[tuple[nn.Module, str], Any]
) -> dict[tuple[nn.Module, str], Tensor]:
    """Return copies in channels-last order of the weights of two-dimensional convolutions that are in another one.

    A convolution with such a weight returns its output in that order, so inputs need no conversion.

    Args:
        module: The module that holds the convolutions.
        in_place_of: Weights to copy in the place of the registered ones, by module and name.
    """
    copies: dict[tuple[nn.Module, str], Tensor] = {}
    for part in module.modules():
        # exact types: a subclass or a parametrised layer computes its weight
        if type(part) in _CONVS and "weight" not in vars(part):
            weight = in_place_of.get((part, "weight"), part.weight)
            if not weight.is_contiguous(memory_format=torch.channels_last):
                copies[part, "weight"] = weight.detach().contiguous(memory_format=torch.channels_last)
    return copies
