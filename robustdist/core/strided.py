"""Convolutions that read single pixels with a stride, as they are in the shortcuts of residual nets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.core.compiled import compiled_part
from robustdist.core.stand_ins import stand_ins

__all__ = ["PickedPixels", "read_pixels", "strided_pointwise"]


def strided_pointwise(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    r"""Let the strided convolutions of ``module`` whose kernel is one pixel pick their pixels before they convolve.

    .. math:: \mathrm{conv}_s(x, w) = \mathrm{conv}_1(x_{::s}, w)

    the same products of the same numbers. On a CPU torch's input gradient of the left side costs seven of its forward
    passes, that of the right side one; a residual net has such a convolution per stage. Parameters, hooks and modes are
    left alone, and so are compiled modules, whose compiler does this, other devices, subclasses of ``nn.Conv2d`` and
    instances with a ``forward`` of their own.
    """
    if device.type != "cpu":
        return nullcontext()
    parts = [part for part in module.modules() if isinstance(part, nn.Conv2d) and _applies(part)]
    if not parts or compiled_part(module) is not None:
        return nullcontext()
    return stand_ins({(part, "forward"): PickedPixels(part) for part in parts})


class PickedPixels:
    """Stands in for the ``forward`` of such a convolution."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self._conv = conv

    def __call__(self, input: Tensor) -> Tensor:
        """Run the convolution on the pixels that it reads, with the weights that it has now."""
        conv = self._conv
        return F.conv2d(read_pixels(input, conv.stride), conv.weight, conv.bias, groups=conv.groups)


def read_pixels(x: Tensor, stride: tuple[int, ...] | list[int]) -> Tensor:
    """Return every n-th entry of ``x`` along its last dimensions, as a convolution with such a stride reads them."""
    places: tuple[Any, ...] = (Ellipsis, *(slice(None, None, step) for step in stride))
    return x[places]


def _applies(part: nn.Conv2d) -> bool:
    return (
        type(part) is nn.Conv2d
        and part.kernel_size == (1, 1)
        and part.padding in ((0, 0), "valid")
        and part.stride != (1, 1)
        and "forward" not in vars(part)
    )
