"""Means over ranks, through a codec: what is sent by whom, in stages that can be pipelined.

All ranks must make the same exchanges of the same length in the same order. Every rank decodes the same bytes in the
same order, its own among them, so all get the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.cast import Identity

__all__ = ["Chunked", "Exchange", "Gather", "Key", "Native", "Owner", "run_pipelined"]


@dataclass(frozen=True)
class Key:
    """What the draws of an exchange depend on, besides the seed of the codec."""

    step: int = 0
    name: str = ""


class Owner(Protocol):
    """What the rank that averages a chunk does around its second encoding: error feedback of its own."""

    def prepare(self, mean: Tensor, begin: int) -> None:
        """Change the mean of the elements from ``begin`` in place before it is encoded."""

    def update(self, mean: Tensor, sent: Tensor, begin: int) -> None:
        """See what was encoded and what everybody decodes; both may be changed."""


class Exchange(ABC):
    """The mean of ``x`` over the ranks of ``group``, written to ``out``.

    Call :meth:`advance` with 0, 1, ... ``num_stages`` - 1. Each stage waits for the collective of the one before,
    works, and starts at most one collective, asynchronously.

    Args:
        x: Flat float32, left as it is.
        out: Same shape; overwritten in the last stage.
        codec: Encodes ``x``; its ``has_memory`` part plays no role here.
        group: Process group, used by nothing else at the same time.
        key: Goes into the draws.
        sent: If given, overwritten in the first stage with what all ranks decode of the own ``x``.
        wait: Waits for a collective in flight; by default its own ``wait``.

    An exception while encoding or decoding does not stop the collectives, in which the others wait for this rank: it is
    kept in ``error``, and the ranks have to tell each other afterwards.

    Attributes:
        bytes_sent: Payload bytes that this rank sends to others, all stages together.
        codec_seconds: Time spent on encoding and decoding.
        error: What went wrong on this rank, or None.
    """

    num_stages: int

    def __init__(
        self,
        x: Tensor,
        out: Tensor,
        codec: Compressor,
        group: dist.ProcessGroup,
        key: Key = Key(),
        *,
        sent: Tensor | None = None,
        wait: Callable[[dist.Work], None] | None = None,
    ) -> None:
        self.x, self.out, self.codec, self.group, self.key, self.sent = x, out, codec, group, key, sent
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0
        self.codec_seconds = 0.0
        self.error: Exception | None = None
        self._work: Any = None
        self._wait = wait

    @abstractmethod
    def advance(self, stage: int) -> None:
        """Run one stage."""

    def wait(self) -> None:
        """Wait for the collective in flight."""
        if self._wait is None:
            self._work.wait()
        else:
            self._wait(self._work)
        self._work = None

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Keep the first exception inside instead of raising it, and count the time."""
        begin = perf_counter()
        try:
            yield
        except Exception as error:  # raised on all ranks afterwards
            self.error = self.error or error
        self.codec_seconds += perf_counter() - begin

    def encode(self, codec: Compressor, x: Tensor, out: Tensor, part: str, sent: Tensor | None = None) -> None:
        """Encode a part of the exchange, with draws of its own, and decode it into ``sent``."""
        out.zero_()  # what the others get if this fails
        with self.keeping_errors():
            codec.encode(x, out, rank=self.rank, step=self.key.step, name=f"{self.key.name}/{part}")
            if sent is not None:
                codec.decode(out, sent)

    def decode(self, codec: Compressor, data: Tensor, out: Tensor, alpha: float | None = None) -> None:
        """Decode bytes of any rank."""
        with self.keeping_errors():
            codec.decode(data, out, alpha=alpha)


class Gather(Exchange):
    """Everybody sends its payload to everybody: one rounding, (n - 1) payloads sent."""

    num_stages = 2

    def advance(self, stage: int) -> None:
        """Encode and gather; decode in rank order."""
        size = self.codec.payload_bytes(self.x.numel())
        stride = aligned(size)
        if stage == 0:
            own = _bytes(stride, self.x)
            own[size:].zero_()
            self.encode(self.codec, self.x, own[:size], "all", self.sent)
            self._all = _bytes(stride * self.world_size, self.x)
            self._work = all_gather(self._all, own, self.group)
            self.bytes_sent += (self.world_size - 1) * size
        else:
            self.wait()
            self.out.zero_()
            for begin in range(0, len(self._all), max(stride, 1)):
                self.decode(self.codec, self._all[begin : begin + size], self.out, 1 / self.world_size)


class Native(Exchange):
    """Payloads of a linear codec are added by an ordinary all-reduce: 2 (n - 1) / n payloads sent."""

    num_stages = 2

    def advance(self, stage: int) -> None:
        """Encode and reduce; decode."""
        if stage == 0:
            self._data = _bytes(self.codec.payload_bytes(self.x.numel()), self.x)
            self.encode(self.codec, self.x, self._data, "all", self.sent)
            values = self.codec.summable(self._data)
            values.mul_(1 / self.world_size)  # before the sum, which so cannot overflow
            self._work = dist.all_reduce(values, group=self.group, async_op=True)
            self.bytes_sent += 2 * (self.world_size - 1) * values.numel() * 4 // self.world_size
        else:
            self.wait()
            self.decode(self.codec, self._data, self.out)


class Chunked(Exchange):
    """Every rank averages one chunk and sends the result back: 2 (n - 1) / n payloads sent, two roundings.

    Args:
        sides: 1 sends the averaged chunks as float32, 2 through the codec again.
        owner: Error feedback for the second encoding.
        **exchange: As in :class:`Exchange`.
    """

    num_stages = 3

    def __init__(self, *args: Any, sides: int = 2, owner: Owner | None = None, **exchange: Any) -> None:
        super().__init__(*args, **exchange)
        self.second = self.codec if sides == 2 else Identity()
        self.owner = owner
        self.chunks = chunks(self.x.numel(), self.world_size, self.codec.block)

    def advance(self, stage: int) -> None:
        """Send chunks to their owners; average and send back; decode."""
        (self._scatter, self._average, self._collect)[stage]()

    def _scatter(self) -> None:
        sizes = [self.codec.payload_bytes(end - begin) for begin, end in self.chunks]
        strides = [aligned(size) for size in sizes]
        payloads = _bytes(sum(strides), self.x)
        start = 0
        for owner, (size, stride, (begin, end)) in enumerate(zip(sizes, strides, self.chunks, strict=True)):
            payloads[start + size : start + stride].zero_()
            sent = None if self.sent is None else self.sent[begin:end]
            self.encode(self.codec, self.x[begin:end], payloads[start : start + size], f"to {owner}", sent)
            start += stride
        self._received = _bytes(strides[self.rank] * self.world_size, self.x)
        self._work = dist.all_to_all_single(
            self._received, payloads, [strides[self.rank]] * self.world_size, strides, self.group, async_op=True
        )
        self.bytes_sent += sum(strides) - strides[self.rank]

    def _average(self) -> None:
        self.wait()
        begin, end = self.chunks[self.rank]
        size = self.codec.payload_bytes(end - begin)
        mean = torch.zeros(end - begin, device=self.x.device)
        for start in range(0, len(self._received), max(aligned(size), 1)):
            self.decode(self.codec, self._received[start : start + size], mean, 1 / self.world_size)
        if self.owner is not None:
            with self.keeping_errors():
                self.owner.prepare(mean, begin)
        second_size = self.second.payload_bytes(end - begin)
        stride = self._second_stride()
        own = _bytes(stride, self.x)
        own[second_size:].zero_()
        sent = None if self.owner is None else torch.empty_like(mean)
        self.encode(self.second, mean, own[:second_size], f"from {self.rank}", sent)
        if self.owner is not None and sent is not None and self.error is None:
            with self.keeping_errors():
                self.owner.update(mean, sent, begin)
        self._all = _bytes(stride * self.world_size, self.x)
        self._work = all_gather(self._all, own, self.group)
        self.bytes_sent += (self.world_size - 1) * stride

    def _collect(self) -> None:
        self.wait()
        stride = self._second_stride()
        for rank, (begin, end) in enumerate(self.chunks):
            start = rank * stride
            size = self.second.payload_bytes(end - begin)
            self.decode(self.second, self._all[start : start + size], self.out[begin:end])

    def _second_stride(self) -> int:
        """All-gather wants equal lengths: that of the longest chunk, which the first one is."""
        begin, end = self.chunks[0]
        return aligned(self.second.payload_bytes(end - begin))


def chunks(numel: int, world_size: int, block: int) -> list[tuple[int, int]]:
    """Cut ``numel`` elements into one range per rank, at multiples of ``block``; the last ones may be empty."""
    step = -(-numel // (world_size * block)) * block
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(world_size)]


def run_pipelined(exchanges: Sequence[Exchange]) -> int:
    """Run exchanges so that one encodes while the one before is on the wire; return the bytes sent."""
    depth = max((exchange.num_stages for exchange in exchanges), default=0)
    for tick in range(len(exchanges) + depth - 1):
        for stage in range(depth):
            place = tick - stage
            if 0 <= place < len(exchanges) and stage < exchanges[place].num_stages:
                exchanges[place].advance(stage)
    return sum(exchange.bytes_sent for exchange in exchanges)


def all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> Any:
    """Gather equal lengths; the function has another name from torch 2.13 on."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=True)


def aligned(size: int) -> int:
    """Round up to a place where a payload may begin."""
    return -(-size // 4) * 4


def _bytes(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=like.device)
