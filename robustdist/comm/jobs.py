"""What the communication thread is given, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Job", "Stats"]


@dataclass
class Job:
    """A bucket on its way: gradients by name (views of ``buffer``), and the future that gets ``buffer``."""

    grads: Mapping[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    step: int
    note: tuple[float, ...]


@dataclass
class Stats:
    """Counters since the start: buckets begun and done, steps, bytes, seconds.

    Of the seconds, ``codec`` is encoding and decoding, ``wait`` is for other ranks.
    """

    begun: int = 0
    calls: int = 0
    steps: int = 0
    bytes_sent: int = 0
    bytes_dense: float = 0.0
    seconds: float = 0.0
    codec_seconds: float = 0.0
    wait_seconds: float = 0.0
