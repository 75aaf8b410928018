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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.cast import Identity
from robustdist.comm.ends import Ends, Owner, Whole
from robustdist.comm.scratch import pool, scratch

__all__ = ["Chunked", "Exchange", "Gather", "Key", "Native", "run_pipelined"]


@dataclass(frozen=True)
class Key:
    """What the draws of an exchange depend on, besides the seed of the codec."""

    step: int = 0
    name: str = ""


class Exchange(ABC):
    """The mean over the ranks of ``group`` of a stretch of elements.

    Call :meth:`advance` with 0, 1, ... ``num_stages`` - 1. Each stage waits for the collective of the one before,
    works, and starts at most one collective, asynchronously.

    Args:
        ends: Where the elements come from and the means go.
        begin: First element of the stretch.
        numel: Its length.
        codec: Encodes; its ``has_memory`` part plays no role here.
        group: Process group, used by nothing else at the same time.
        key: Goes into the draws.
        device: Where payloads are made, by default on the CPU.
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
        ends: Ends,
        begin: int,
        numel: int,
        codec: Compressor,
        group: dist.ProcessGroup,
        key: Key = Key(),
        *,
        device: torch.device | None = None,
        wait: Callable[[dist.Work], None] | None = None,
    ) -> None:
        self.ends, self.begin, self.numel, self.codec, self.group, self.key = ends, begin, numel, codec, group, key
        self.device = torch.device("cpu") if device is None else device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0
        self.codec_seconds = 0.0
        self.error: Exception | None = None
        self._work: Any = None
        self._wait = wait
        self._taken: list[Tensor] = []

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

    def encode(self, begin: int, length: int, out: Tensor, part: str) -> None:
        """Encode a part of the stretch, with draws of its own."""
        self.encode_parts(
            self.codec,
            length,
            lambda first, size: self.ends.load(self.begin + begin + first, size),
            out,
            (lambda first, *pair: self.ends.keep(self.begin + begin + first, *pair)) if self.ends.keeps else None,
            part,
        )

    def encode_parts(
        self,
        codec: Compressor,
        length: int,
        load: Callable[[int, int], Tensor],
        out: Tensor,
        keep: Callable[[int, Tensor, Tensor], object] | None,
        part: str,
    ) -> None:
        """Encode as the codec does; if that fails, the others get zeros."""
        with self.keeping_errors():
            try:
                name = f"{self.key.name}/{part}"
                codec.encode_parts(length, load, out, keep, rank=self.rank, step=self.key.step, name=name)
            except Exception:
                out.zero_()
                raise

    def decode(self, codec: Compressor, begin: int, length: int, payloads: Sequence[Tensor], alpha: float) -> None:
        """Store what payloads stand for as means of a part of the stretch."""
        with self.keeping_errors():
            codec.decode_parts(
                length, payloads, lambda first, mean: self.ends.store(self.begin + begin + first, mean), alpha=alpha
            )

    def bytes(self, size: int) -> Tensor:
        """Return a buffer that is kept until the end of the exchange."""
        self._taken.append(pool.take(size, self.device))
        return self._taken[-1]

    def end(self) -> None:
        """Give the buffers back."""
        for buffer in self._taken:
            pool.give(buffer)
        self._taken = []


class Gather(Exchange):
    """Everybody sends its payload to everybody: one rounding, (n - 1) payloads sent."""

    num_stages = 2

    def advance(self, stage: int) -> None:
        """Encode and gather; decode in rank order."""
        size = self.codec.payload_bytes(self.numel)
        stride = aligned(size)
        if stage == 0:
            own = self.bytes(stride)
            own[size:].zero_()
            self.encode(0, self.numel, own[:size], "all")
            self._all = self.bytes(stride * self.world_size)
            self._work = all_gather(self._all, own, self.group)
            self.bytes_sent += (self.world_size - 1) * size
        else:
            self.wait()
            payloads = [self._all[rank * stride : rank * stride + size] for rank in range(self.world_size)]
            self.decode(self.codec, 0, self.numel, payloads, 1 / self.world_size)
            self.end()


class Native(Exchange):
    """Payloads of a linear codec are added by an ordinary all-reduce: 2 (n - 1) / n payloads sent."""

    num_stages = 2

    def advance(self, stage: int) -> None:
        """Encode and reduce; decode."""
        if stage == 0:
            self._data = self.bytes(self.codec.payload_bytes(self.numel))
            self.encode(0, self.numel, self._data, "all")
            values = self.codec.summable(self._data)
            values.mul_(1 / self.world_size)  # before the sum, which so cannot overflow
            self._work = dist.all_reduce(values, group=self.group, async_op=True)
            self.bytes_sent += 2 * (self.world_size - 1) * values.numel() * 4 // self.world_size
        else:
            self.wait()
            self.decode(self.codec, 0, self.numel, [self._data], 1.0)
            self.end()


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
        self.chunks = chunks(self.numel, self.world_size, self.codec.block)

    def advance(self, stage: int) -> None:
        """Send chunks to their owners; average and send back; decode."""
        (self._scatter, self._average, self._collect)[stage]()

    def _scatter(self) -> None:
        sizes = [self.codec.payload_bytes(end - begin) for begin, end in self.chunks]
        strides = [aligned(size) for size in sizes]
        payloads = self.bytes(sum(strides))
        start = 0
        for owner, (size, stride, (begin, end)) in enumerate(zip(sizes, strides, self.chunks, strict=True)):
            payloads[start + size : start + stride].zero_()
            self.encode(begin, end - begin, payloads[start : start + size], f"to {owner}")
            start += stride
        self._received = self.bytes(strides[self.rank] * self.world_size)
        self._work = dist.all_to_all_single(
            self._received, payloads, [strides[self.rank]] * self.world_size, strides, self.group, async_op=True
        )
        self.bytes_sent += sum(strides) - strides[self.rank]

    def _average(self) -> None:
        self.wait()
        begin, end = self.chunks[self.rank]
        length = end - begin
        size, second_size = self.codec.payload_bytes(length), self.second.payload_bytes(length)
        received = [self._received[rank * aligned(size) :][:size] for rank in range(self.world_size)]
        mean = Whole(*[scratch("mean", length, torch.float32, self.device)] * 2)
        if length:
            with self.keeping_errors():
                self.codec.decode_parts(length, received, mean.store, alpha=1 / self.world_size)
        stride = self._second_stride()
        own = self.bytes(stride)
        own[second_size:].zero_()
        owner, first = None if self.error is not None else self.owner, self.begin + begin
        if owner is not None:
            owner.open(first, length)

        def load(place: int, part: int) -> Tensor:
            value = mean.load(place, part)
            if owner is not None:
                owner.prepare(first + place, value)
            self.ends.fill(first + place, value)
            return value

        def keep(place: int, value: Tensor, sent: Tensor) -> None:
            if owner is not None:
                owner.update(first + place, value, sent)

        self.encode_parts(
            self.second, length, load, own[:second_size], None if owner is None else keep, f"from {self.rank}"
        )
        self._all = self.bytes(stride * self.world_size)
        self._work = all_gather(self._all, own, self.group)
        self.bytes_sent += (self.world_size - 1) * stride

    def _collect(self) -> None:
        self.wait()
        stride = self._second_stride()
        for rank, (begin, end) in enumerate(self.chunks):
            data = self._all[rank * stride :][: self.second.payload_bytes(end - begin)]
            self.decode(self.second, begin, end - begin, [data], 1.0)
        self.end()

    def _second_stride(self) -> int:
        """All-gather wants equal lengths: that of the longest chunk, which the first one is."""
        begin, end = self.chunks[0]
        return aligned(self.second.payload_bytes(end - begin))


def chunks(numel: int, world_size: int, block: int) -> list[tuple[int, int]]:
    """Cut ``numel`` elements into one range per rank, at multiples of ``block``; the last ones may be empty."""
    step = -(-numel // (world_size * block)) * block
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(world_size)]


def run_pipelined(exchanges: Sequence[Exchange], *, lag: int = 8) -> int:
    """Run exchanges so that several are on the wire while one encodes; return the bytes sent.

    Args:
        exchanges: In the order in which all ranks run them.
        lag: How many later exchanges begin a stage before one goes on to the next. One or two collectives do not
            fill a link, least of all when the system lets a rank wait for its processor.
    """
    depth = max((exchange.num_stages for exchange in exchanges), default=0)
    for tick in range(len(exchanges) + lag * (depth - 1)):
        for stage in range(depth):
            place = tick - lag * stage
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
