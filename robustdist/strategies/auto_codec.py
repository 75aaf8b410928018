"""The codec that is asked for, and what ``compressor="auto"`` stands for."""

from __future__ import annotations

import torch
from torch import nn

from robustdist._lightning import rank_zero_info
from robustdist.comm import QSGD, Compressor, make_compressor
from robustdist.comm.link import measure_link, pick_compressor

__all__ = ["given_codec", "measured_codec", "num_gradients", "plain_stats"]


def given_codec(compressor: Compressor | str | None) -> Compressor | None:
    """Return the codec of an argument of the strategy, None for "auto"."""
    if compressor is None:
        return QSGD(bits=4)
    if not isinstance(compressor, str):
        return compressor
    return None if compressor.lower() == "auto" else make_compressor(compressor)


def plain_stats(steps: float, num_bytes: float) -> dict[str, float]:
    """Return the counters of a training whose float32 gradients DDP averages by itself.

    Args:
        steps: Number of steps.
        num_bytes: Bytes that a process sends per step.
    """
    total = steps * num_bytes
    return {"calls": 0, "steps": steps, "bytes_sent": total, "bytes_dense": total, "ratio": 1.0, "wait_seconds": 0.0}


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
