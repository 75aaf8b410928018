"""A stream of a device for communication, in order with that of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["OwnStream"]


class OwnStream:
    """Runs work of a CUDA device beside what its caller gives the device next; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after_caller(self, device: torch.device) -> Iterator[None]:
        """Give the device what is inside after all that the caller has given it so far."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def future(self, device: torch.device) -> torch.futures.Future[torch.Tensor]:
        """Return a future whose ``wait`` makes the stream of its caller wait, and not the host."""
        devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        return future
