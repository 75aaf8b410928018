"""One thread per process that takes buckets of gradients through the codec and the network, in order."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.cast import Identity
from robustdist.comm.collectives import Chunked, Exchange, Gather, Key, Native, run_pipelined
from robustdist.comm.cost import Collective, choose, dense_bytes
from robustdist.comm.error_feedback import ErrorFeedback, Memory, is_finite
from robustdist.comm.layout import Layout, Place
from robustdist.comm.low_rank import PowerSGD
from robustdist.comm.owner import OwnerResiduals
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["CommEngine", "RankError"]


class RankError(RuntimeError):
    """Another rank, or this one, failed in the communication thread; the text names it."""


@dataclass
class Job:
    """A bucket on its way: gradients by name (views of ``buffer``), and the future that gets ``buffer``."""

    grads: Mapping[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    step: int


@dataclass
class Stats:
    """Counters since the start."""

    calls: int = 0
    steps: int = 0
    bytes_sent: int = 0
    bytes_dense: float = 0.0
    seconds: float = 0.0


class CommEngine:
    """Means of named gradients over the ranks of a group, through a codec, in a thread of its own.

    :meth:`submit` returns at once; buckets are worked on in the order of the calls, which must be equal on all ranks.
    After each bucket the ranks tell each other whether they failed, and if one did, all of them raise its text.

    Args:
        codec: The codec; with error feedback its contractive form is used.
        group: Process group for this engine alone; by default a new one of all ranks, so that all must make the engine.
        error_feedback: Keep what codecs leave out and add it to the next gradient, at the senders and at the owners of
            chunks. Codecs with a memory of their own keep it in either case.
        sides: 2 encodes the averaged chunks too, 1 sends them as float32.
        collective: "auto", "chunked", "gather" or "native".
        small: Parameters of fewer elements travel uncompressed, together.
        segment: Elements that are encoded while the ones before are on the wire.

    Raises:
        UsageError: If an argument is out of range, on all ranks if the settings of the ranks differ.
    """

    def __init__(
        self,
        codec: Compressor,
        *,
        group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
        sides: int = 2,
        collective: Collective | Literal["auto"] = "auto",
        small: int = 1024,
        segment: int = 2 * 1024 * 1024,
    ) -> None:
        if sides not in (1, 2):
            raise UsageError(f"sides={sides!r} must be 1 (workers compress) or 2 (averages are compressed too)")
        if isinstance(codec, PowerSGD):
            raise UsageError("PowerSGD needs whole matrices, which this engine does not reduce: use another compressor")
        self.codec = codec.contractive() if error_feedback and not codec.has_memory else codec
        choose(self.codec, 1, 2, collective, sides)
        self.error_feedback, self.sides, self.collective = error_feedback, sides, collective
        self.small, self.segment = check_count(small, "small"), check_count(segment, "segment")
        self.memory: Memory | None = None
        self.owned: OwnerResiduals | None = None
        # what a cast to 16 bits loses is not worth a copy of the model
        if codec.has_memory or (error_feedback and (self.codec.delta(2**20) or 0.0) < 1 - 2.0**-15):
            self.memory = codec.make_memory()
            # a memory that is part of the method has no counterpart for the second rounding: it stays exact
            self.sides = 1 if codec.has_memory else sides
            self.owned = None if codec.has_memory or sides == 1 else OwnerResiduals()
        #: Factor of a gradient scaler that the gradients of the present step carry.
        self.scale = 1.0
        self.stats = Stats()
        self._group = group if group is not None else cast("dist.ProcessGroup", dist.new_group())
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._agree()
        self._layouts: dict[Any, tuple[Layout, tuple[Tensor, ...]]] = {}
        self._failed: BaseException | None = None
        self._step: int | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="robustdist-comm", daemon=True)
        self._thread.start()

    # --- for the thread of the caller

    def submit(self, grads: Mapping[str, Tensor], buffer: Tensor, *, step: int) -> torch.futures.Future[Tensor]:
        """Enqueue a bucket.

        Args:
            grads: Gradients by name of parameter, views of ``buffer``, equal names and shapes on all ranks.
            buffer: What the future gives back, with the means in the place of the gradients.
            step: Number of the synchronised step.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the engine was closed: make a new one")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._jobs.put(Job(dict(grads), buffer, future, step))
        return future

    def commit(self) -> None:
        """Make the residuals of the step final: it was executed."""
        for memory in self._memories():
            memory.commit()

    def rollback(self) -> None:
        """Put the residuals back: the step was skipped."""
        for memory in self._memories():
            memory.rollback()

    def close(self) -> None:
        """End the thread once all buckets are done."""
        self._jobs.put(None)
        self._thread.join()

    def comm_stats(self) -> dict[str, float]:
        """Return counters: buckets, steps, bytes sent by this rank, bytes of float32, their ratio, seconds."""
        stats = self.stats
        return {
            "calls": stats.calls,
            "steps": stats.steps,
            "bytes_sent": stats.bytes_sent,
            "bytes_dense": stats.bytes_dense,
            "ratio": stats.bytes_dense / stats.bytes_sent if stats.bytes_sent else 1.0,
            "seconds": stats.seconds,
        }

    def _memories(self) -> list[Memory]:
        return [memory for memory in (self.memory, self.owned) if memory is not None]

    # --- for the thread of the engine

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            begin = perf_counter()
            try:
                if self._failed is not None:
                    raise self._failed
                with torch.no_grad():
                    self._reduce(job)
                self.stats.calls += 1
                self.stats.steps += job.step != self._step
                self._step = job.step
                self.stats.seconds += perf_counter() - begin
                job.future.set_result(job.buffer)
            except Exception as error:  # whatever it is, backward has to end with it
                self._failed = error
                job.future.set_exception(error)  # type: ignore[arg-type]  # its annotation asks for a result

    def _reduce(self, job: Job) -> None:
        numel = sum(grad.numel() for grad in job.grads.values())
        self.stats.bytes_dense += dense_bytes(numel, self.world_size)
        if self.world_size == 1:
            return
        if isinstance(self.codec, Identity):
            # what DDP does by itself, bit for bit
            job.buffer.mul_(1 / self.world_size)
            dist.all_reduce(job.buffer, group=self._group)
            self.stats.bytes_sent += int(dense_bytes(job.buffer.numel(), self.world_size))
            return
        layout, buffers = self._layout(job)
        flat, mean, sent, side = buffers
        errors: list[Exception] = []
        try:
            layout.load(job.grads, flat, side)
            if self.memory is not None:
                for place in layout.places:
                    self.memory.prepare(place.name, place.of(flat), scale=self.scale)
        except Exception as error:  # told to all ranks below
            errors.append(error)
        exchanges = self._exchanges(layout, buffers, job)
        self.stats.bytes_sent += run_pipelined(exchanges)
        errors += [exchange.error for exchange in exchanges if exchange.error is not None]
        self._meet(side, errors)
        if self.memory is not None:
            for place in layout.places:
                self.memory.update(place.name, place.of(flat), place.of(sent), scale=self.scale)
                self._finish(place, mean)
            for place in layout.sides:
                self.memory.dense(place.name, place.of(side), scale=self.scale)
        layout.store(mean, side, job.grads)

    def _exchanges(self, layout: Layout, buffers: tuple[Tensor, ...], job: Job) -> list[Exchange]:
        """Cut the flat buffer into segments."""
        flat, mean, sent, _ = buffers
        exchanges: list[Exchange] = []
        for begin in range(0, layout.total, self.segment):
            part = slice(begin, min(begin + self.segment, layout.total))
            kind = choose(self.codec, part.stop - begin, self.world_size, self.collective, self.sides)
            key = Key(job.step, f"{layout.places[0].name}/{begin}")
            own = sent[part] if self.memory is not None else None
            if kind == "chunked":
                owner = None if self.owned is None else self.owned.view(layout, begin, self.scale)
                exchange: Exchange = Chunked(
                    flat[part], mean[part], self.codec, self._group, key, sent=own, sides=self.sides, owner=owner
                )
            else:
                plain = Gather if kind == "gather" else Native
                exchange = plain(flat[part], mean[part], self.codec, self._group, key, sent=own)
            exchanges.append(exchange)
        return exchanges

    def _meet(self, side: Tensor, errors: list[Exception]) -> None:
        """Reduce the small parameters; the last element counts the ranks that failed, and all raise if one did."""
        side.mul_(1 / self.world_size)
        side[-1] = float(bool(errors))
        dist.all_reduce(side, group=self._group)
        self.stats.bytes_sent += int(dense_bytes(side.numel(), self.world_size))
        if side[-1] == 0:
            return
        texts: list[str | None] = [None] * self.world_size
        own = "".join(traceback.format_exception(errors[0])) if errors else None
        dist.all_gather_object(texts, own, group=self._group)
        told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        raise RankError("communication failed\n" + "\n".join(told)) from (errors[0] if errors else None)

    def _finish(self, place: Place, mean: Tensor) -> None:
        """Let the memory see the mean; what is not finite is undone for owners as well."""
        if self.memory is None:
            return
        if self.owned is not None and not is_finite(place.of(mean)):
            self.owned.undo_parameter(place.name)
        self.memory.finish(place.name, place.of(mean), scale=self.scale)

    def _layout(self, job: Job) -> tuple[Layout, tuple[Tensor, ...]]:
        """Return the layout of a bucket with its buffers; a new one replaces those that hold the same parameters."""
        signature = tuple((name, tuple(grad.shape)) for name, grad in job.grads.items())
        if signature not in self._layouts:
            layout = Layout(signature, block=self.codec.block, small=self.small)
            names = set(job.grads)
            self._layouts = {key: kept for key, kept in self._layouts.items() if not names & {name for name, _ in key}}
            device = job.buffer.device
            flats = [torch.empty(layout.total, device=device) for _ in range(3 if self.memory is not None else 2)]
            flat, mean, sent = flats[0], flats[1], flats[-1]
            side = torch.empty(layout.side_total + 1, device=device)
            self._layouts[signature] = (layout, (flat, mean, sent, side))
            if self.owned is not None and isinstance(self.memory, ErrorFeedback):
                self.owned.give_back(layout, self.memory, self.world_size)
        return self._layouts[signature]

    def _agree(self) -> None:
        """Compare the settings of all ranks."""
        own = repr((self.codec, self.error_feedback, self.sides, self.collective, self.small, self.segment))
        settings: list[str] = [own] * self.world_size
        dist.all_gather_object(settings, own, group=self._group)
        if len(set(settings)) > 1:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(settings))
            raise UsageError(f"compressor: the ranks have different settings, give all of them the same ({told})")
