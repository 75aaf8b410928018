"""How fast codecs are on one core."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from robustdist.comm import Compressor

__all__ = ["codec_speed"]

_NUMEL = 4 * 1024 * 1024


def codec_speed(codec: Compressor, *, numel: int = _NUMEL, repeats: int = 5) -> dict[str, float]:
    """Return nanoseconds of processor time of this thread per element, the least of ``repeats`` after one more.

    Args:
        codec: The codec; it gets Gaussian noise.
        numel: Number of elements.
        repeats: Number of times.

    Returns:
        ``encode``, ``decode``, ``accumulate`` (decode and add), in ns per element.
    """
    x = torch.empty(numel).normal_(generator=torch.Generator().manual_seed(0))
    data = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
    out = torch.zeros(numel)
    calls: dict[str, Callable[[int], None]] = {
        "encode": lambda step: codec.encode(x, data, step=step),
        "decode": lambda step: codec.decode(data, out),
        "accumulate": lambda step: codec.decode(data, out, alpha=0.5),
    }
    found = {}
    with torch.no_grad():
        for name, call in calls.items():
            call(0)
            times = []
            for step in range(1, repeats + 1):
                begin = time.thread_time()
                call(step)
                times.append(time.thread_time() - begin)
            found[name] = 1e9 * min(times) / numel
    return found
