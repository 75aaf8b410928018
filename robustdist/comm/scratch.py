"""Buffers that live as long as their thread: codecs and collectives allocate nothing once they are warm."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["TILE", "Pool", "pool", "scratch"]

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


class Pool(threading.local):
    """Buffers of bytes for what is on the wire, one set per thread: several of the same size may be in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[Tensor]] = {}

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return ``size`` uninitialised bytes, valid until they are given back."""
        # sizes differ from segment to segment, and with the bits: a few classes serve all of them
        key = (1 << max(size - 1, 1).bit_length(), device)
        free = self._free.get(key)
        return (free.pop() if free else torch.empty(key[0], dtype=torch.uint8, device=device))[:size]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back that :meth:`take` returned in this thread."""
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
        self._free.setdefault((len(whole), buffer.device), []).append(whole)


scratch = _Scratch()
pool = Pool()
