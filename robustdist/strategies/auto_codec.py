"""The codec that ``compressor="auto"`` stands for."""

from __future__ import annotations

import torch
from torch import nn

from robustdist._lightning import rank_zero_info
from robustdist.comm import Compressor
from robustdist.comm.link import measure_link, pick_compressor

__all__ = ["measured_codec", "num_gradients"]


def measured_codec(module: nn.Module, device: torch.device) -> Compressor:
    """Measure the link and the codecs, and return the one to use for the gradients of a module; a collective.

    Args:
        module: The module.
        device: Where its gradients are.
    """
    numel = num_gradients(module)
    link = measure_link(device=device)
    codec = pick_compressor(numel, link, device=device)
    rank_zero_info(f"compressor='auto': {link}, {numel:,} elements: {codec!r}")
    return codec


def num_gradients(module: nn.Module) -> int:
    """Return the number of elements of all gradients."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
