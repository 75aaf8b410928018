"""Buffers that live as long as their thread: codecs allocate nothing once they are warm."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["TILE", "scratch"]

#: Elements that are encoded together. Small enough for the caches, large enough to hide the cost of a call.
TILE = 128 * 1024


class _Scratch(threading.local):
    """Named uninitialised buffers, one set per thread; a codec object itself stays free of them and can be pickled."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return ``numel`` uninitialised elements, valid until the same name is asked for again in this thread."""
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < numel:
            buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]


scratch = _Scratch()
