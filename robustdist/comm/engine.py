"""One thread per process that takes buckets of gradients through the codec and the network, in order."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.buckets import Bucket, Buckets, Cut, Signature
from robustdist.comm.cast import Identity
from robustdist.comm.collectives import Chunked, Exchange, Gather, Key, Native, chunks, run_pipelined
from robustdist.comm.cost import Collective, choose, dense_bytes, keeps_residuals
from robustdist.comm.error_feedback import ErrorFeedback, Memory, is_finite
from robustdist.comm.jobs import Job, Stats
from robustdist.comm.layout import Layout, Place
from robustdist.comm.low_rank import PowerSGD
from robustdist.comm.owner import OwnerResiduals
from robustdist.comm.wire import RankError, Wire
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.types import check_count

__all__ = ["CommEngine", "RankError"]


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
        timeout: Seconds after which a collective of the engine's own group fails; by default those of torch.

    Attributes:
        codec: The codec in use, in the form in which it is used.
        scale: Factor of a gradient scaler that the gradients of the present step carry.
        note: Means over the ranks of the last note that was submitted and has arrived.
        nonfinite: The last parameter whose mean was not finite, where a memory had to be kept from it.
        memory: What this rank keeps as a sender, or None.
        owned: What this rank keeps as the owner of chunks, or None.
        stats: Counters.

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
        timeout: float | None = None,
    ) -> None:
        self.error_feedback, self.sides, self.collective = error_feedback, sides, collective
        self.small, self.segment = check_count(small, "small"), check_count(segment, "segment")
        self.codec = self._usable(codec)
        self.memory = self._make_memory(self.codec)
        self.owned: OwnerResiduals | None = None
        if codec.has_memory:
            self.sides = 1  # a memory that is part of the method has no counterpart for the second rounding
        elif self.memory is not None and sides == 2:
            self.owned = OwnerResiduals()
        self.scale = 1.0
        self.note: tuple[float, ...] = ()
        self.nonfinite: str | None = None
        self.stats = Stats()
        self._wire = Wire(group, timeout, self.stats)
        self.rank, self.world_size = self._wire.rank, self._wire.world_size
        self._wire.open(self._settings())
        self._buckets = Buckets(self._cut, self._give_back, copies=2 if self.memory is None else 3)
        self._failed: BaseException | None = None
        self._step: int | None = None
        self._jobs: SimpleQueue[Job | Compressor | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="robustdist-comm", daemon=True)
        self._thread.start()

    # --- for the thread of the caller

    def submit(
        self, grads: Mapping[str, Tensor], buffer: Tensor, *, step: int, note: Sequence[float] = ()
    ) -> torch.futures.Future[Tensor]:
        """Enqueue a bucket.

        Args:
            grads: Gradients by name of parameter, views of ``buffer``, equal names and shapes on all ranks.
            buffer: What the future gives back, with the means in the place of the gradients.
            step: Number of the synchronised step.
            note: A few numbers, as many on all ranks, whose means travel with the bucket in float32; once the future
                is done they are in ``self.note``, the same bits on all ranks.
        """
        self._check_open()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._jobs.put(Job(dict(grads), buffer, future, step, tuple(map(float, note))))
        return future

    def change(self, codec: Compressor) -> None:
        """Use another codec for the buckets submitted from now on; all ranks must call it at the same place.

        Residuals stay: they are in units of the gradient.

        Raises:
            UsageError: If the codec needs another kind of memory than the present one; on all ranks, from the next
                bucket on, if they do not change to the same codec.
        """
        self._check_open()
        codec = self._usable(codec)
        old, new = _kind(self.memory), _kind(self._make_memory(codec))
        if old != new:
            raise UsageError(f"compressor={codec!r} keeps {new}, the engine has {old}: make a new engine for it")
        self._jobs.put(codec)

    def commit(self) -> None:
        """Make the residuals of the step final: it was executed."""
        for memory in self._memories():
            memory.commit()

    def rollback(self) -> None:
        """Put the residuals back: the step was skipped."""
        for memory in self._memories():
            memory.rollback()

    def close(self, *, seconds: float = 30.0) -> None:
        """End the thread once all buckets are done, and destroy the group if the engine made it.

        Args:
            seconds: How long to wait without seeing a bucket done. A thread that still waits for other ranks then is
                left to the end of the process, with a warning.
        """
        self._jobs.put(None)
        calls = -1
        while self._thread.is_alive() and calls != self.stats.calls:
            calls = self.stats.calls
            self._thread.join(seconds)
        if self._thread.is_alive():
            warnings.warn(
                f"communication: rank {self.rank} has waited {seconds:g} s for other ranks, its thread is left behind",
                RobustDistWarning,
                stacklevel=2,
            )
        else:
            self._wire.close(healthy=self._failed is None)

    def comm_stats(self) -> dict[str, float]:
        """Return counters: buckets, steps, bytes sent by this rank, bytes of float32, their ratio, seconds.

        ``codec_seconds`` is encoding and decoding, ``wait_seconds`` waiting for other ranks; copies, residuals and
        overlap with neither make up the rest of ``seconds``.
        """
        stats = self.stats
        return {
            "calls": stats.calls,
            "steps": stats.steps,
            "bytes_sent": stats.bytes_sent,
            "bytes_dense": stats.bytes_dense,
            "ratio": stats.bytes_dense / stats.bytes_sent if stats.bytes_sent else 1.0,
            "seconds": stats.seconds,
            "codec_seconds": stats.codec_seconds,
            "wait_seconds": stats.wait_seconds,
        }

    def _check_open(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the engine was closed: make a new one")

    def _usable(self, codec: Compressor) -> Compressor:
        """Return the form of a codec that can be used here."""
        if isinstance(codec, PowerSGD):
            raise UsageError("PowerSGD needs whole matrices, which this engine does not reduce: use another compressor")
        codec = codec.contractive() if self.error_feedback and not codec.has_memory else codec
        choose(codec, 1, 2, self.collective, self.sides)
        return codec

    def _make_memory(self, codec: Compressor) -> Memory | None:
        kept = codec.has_memory or (self.error_feedback and keeps_residuals(codec))
        return codec.make_memory() if kept else None

    def _memories(self) -> list[Memory]:
        return [memory for memory in (self.memory, self.owned) if memory is not None]

    # --- for the thread of the engine

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            self._attempt(job)

    def _attempt(self, job: Job | Compressor) -> None:
        try:
            if self._failed is not None:
                raise self._failed
            self._wire.listen()
            if isinstance(job, Compressor):
                self._change(job)
            else:
                self._work(job)
        except Exception as error:  # whatever it is, backward has to end with it
            self._failed = self._failed or self._wire.tell(error)
            if isinstance(job, Job):
                job.future.set_exception(self._failed)  # type: ignore[arg-type]  # its annotation asks for a result

    def _work(self, job: Job) -> None:
        begin = perf_counter()
        self.stats.begun += 1
        with torch.no_grad():
            self._reduce(job)
        self.stats.calls += 1
        self.stats.steps += job.step != self._step
        self._step = job.step
        self.stats.seconds += perf_counter() - begin
        job.future.set_result(job.buffer)

    def _change(self, codec: Compressor) -> None:
        """Go on with another codec; a bucket is laid out anew if its blocks or collectives are others with it."""
        self.codec = codec
        self._wire.compare(self._settings())
        self._buckets.recut()

    def _reduce(self, job: Job) -> None:
        numel = sum(grad.numel() for grad in job.grads.values())
        self.stats.bytes_dense += dense_bytes(numel, self.world_size)
        if self.world_size == 1:
            self.note = job.note or self.note
            return
        if isinstance(self.codec, Identity):
            # what DDP does by itself, bit for bit
            self._wire.mean(job.buffer)
            if job.note:
                note = torch.tensor(job.note, device=job.buffer.device)
                self._wire.mean(note)
                self.note = tuple(note.tolist())
            return
        bucket = self._buckets.find(job.grads, job.buffer)
        layout, flat, side = bucket.cut.layout, bucket.flat, bucket.make_side(len(job.note) + 1)
        errors: list[Exception] = []
        try:
            layout.load(job.grads, flat, side)
            if self.memory is not None:
                for place in layout.places:
                    self.memory.prepare(place.name, place.of(flat), scale=self.scale)
        except Exception as error:  # told to all ranks below
            errors.append(error)
        exchanges = self._exchanges(bucket, job)
        self.stats.bytes_sent += run_pipelined(exchanges)
        self.stats.codec_seconds += sum(exchange.codec_seconds for exchange in exchanges)
        errors += [exchange.error for exchange in exchanges if exchange.error is not None]
        self._meet(side, job.note, errors)
        if self.memory is not None:
            for place in layout.places:
                self.memory.update(place.name, place.of(flat), place.of(bucket.sent), scale=self.scale)
                self._finish(place, bucket.mean)
            for place in layout.sides:
                self.memory.dense(place.name, place.of(side), scale=self.scale)
        layout.store(bucket.mean, side, job.grads)

    def _cut(self, signature: Signature) -> Cut:
        """Lay parameters out and choose a collective for every segment."""
        layout = Layout(signature, block=self.codec.block, small=self.small)
        sizes = [min(self.segment, layout.total - begin) for begin in range(0, layout.total, self.segment)]
        kinds = tuple(choose(self.codec, size, self.world_size, self.collective, self.sides) for size in sizes)
        return Cut(layout, kinds)

    def _give_back(self, cut: Cut) -> None:
        """Let no owner keep anything of a chunk that is no longer its own."""
        if self.owned is not None and isinstance(self.memory, ErrorFeedback):
            self.owned.give_back(cut.layout, self._own_chunks(cut), self.memory, self.world_size)

    def _own_chunks(self, cut: Cut) -> list[tuple[int, int]]:
        """Begin and end of the chunks that this rank averages."""
        total, own = cut.layout.total, []
        for place, kind in enumerate(cut.kinds):
            if kind == "chunked":
                first = place * self.segment
                begin, end = chunks(min(self.segment, total - first), self.world_size, self.codec.block)[self.rank]
                own.append((first + begin, first + end))
        return own

    def _exchanges(self, bucket: Bucket, job: Job) -> list[Exchange]:
        """Cut the flat buffer into segments."""
        layout, exchanges = bucket.cut.layout, list[Exchange]()
        wait = self._wire.wait if job.buffer.device.type == "cpu" else None
        for place, kind in enumerate(bucket.cut.kinds):
            begin = place * self.segment
            part = slice(begin, min(begin + self.segment, layout.total))
            key = Key(job.step, f"{layout.places[0].name}/{begin}")
            own = bucket.sent[part] if self.memory is not None else None
            what = (bucket.flat[part], bucket.mean[part], self.codec, self._wire.group, key)
            if kind == "chunked":
                owner = None if self.owned is None else self.owned.view(layout, begin, self.scale)
                exchanges.append(Chunked(*what, sent=own, wait=wait, sides=self.sides, owner=owner))
            else:
                exchanges.append((Gather if kind == "gather" else Native)(*what, sent=own, wait=wait))
        return exchanges

    def _meet(self, side: Tensor, note: tuple[float, ...], errors: list[Exception]) -> None:
        """Reduce the small parameters and the note; the last element counts failed ranks: all raise if there is one."""
        end = len(side) - 1 - len(note)
        side[end:-1] = torch.tensor(note)
        side.mul_(1 / self.world_size)
        side[-1] = float(bool(errors))
        self._wire.sum(side)
        if side[-1] != 0:
            self._wire.confess(errors[0] if errors else None)
        self.note = tuple(side[end:-1].tolist()) or self.note

    def _finish(self, place: Place, mean: Tensor) -> None:
        """Let the memory see the mean; what is not finite is undone for owners as well."""
        if self.memory is None:
            return
        if not is_finite(place.of(mean)):
            self.nonfinite = place.name
            if self.owned is not None:
                self.owned.undo_parameter(place.name)
        self.memory.finish(place.name, place.of(mean), scale=self.scale)

    def _settings(self) -> str:
        return repr((self.codec, self.error_feedback, self.sides, self.collective, self.small, self.segment))


def _kind(memory: Memory | None) -> str:
    """Describe a memory by what must stay the same while it is in use."""
    if memory is None:
        return "no memory"
    settings = {name: value for name, value in vars(memory).items() if not name.startswith("_")}
    return f"{type(memory).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"
