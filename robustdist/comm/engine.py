"""Takes buckets of gradients through the codec and the network in order, in a thread or where they are handed over."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.cost import Collective
from robustdist.comm.grouping import Group
from robustdist.comm.jobs import Job, Times
from robustdist.comm.own_stream import OwnStream
from robustdist.comm.reduction import Reduction
from robustdist.comm.wire import RankError
from robustdist.errors import RobustDistWarning

__all__ = ["CommEngine", "RankError"]


class CommEngine(Reduction):
    """Means of named gradients over the ranks of a group, through a codec, in a thread of its own.

    :meth:`submit` returns at once; buckets are worked on in the order of the calls, which must be equal on all ranks.
    After each bucket the ranks tell each other whether they failed, and if one did, all of them raise its text. With
    NCCL there is no thread, see ``inline``: the device is given all the work at once and the host waits in
    :meth:`settle`.

    Args:
        codec: The codec; with error feedback its contractive form is used.
        group: Process group for this engine alone; by default a new one of all ranks, so that all must make the engine.
        error_feedback: Keep what codecs leave out and add it to the next gradient, at the senders and at the owners of
            chunks. Codecs with a memory of their own keep it in either case.
        sides: 2 encodes the averaged chunks too, 1 sends them as float32.
        collective: "auto", "chunked", "gather" or "native".
        small: Parameters of fewer elements travel uncompressed, together.
        segment: Elements that are encoded while the ones before are on the wire, by default as many as make messages
            of 32 KiB, and 256 Ki or more.
        dynamic: Agree before each bucket on the parameters that have a gradient on any rank. The others are not sent,
            and nothing that is kept for them changes.
        warmup_steps: First steps, as :meth:`commit` counts them, whose gradients are averaged uncompressed. Residuals
            begin at zero after them; a momentum that is part of the codec, as in ``DGC``, is applied from the start.
        timeout: Seconds after which a collective of the engine's own group fails; by default those of torch.
        inline: Work in :meth:`submit` instead of in a thread, on a stream of its own where gradients are on a CUDA
            device; by default with NCCL, and only there. What a step led to is then learnt in :meth:`settle`.

    Attributes:
        codec: The codec in use, in the form in which it is used.
        num_steps: Executed steps so far; a resumed run sets it.
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
        segment: int | None = None,
        dynamic: bool = False,
        warmup_steps: int = 0,
        timeout: float | None = None,
        inline: bool | None = None,
    ) -> None:
        super().__init__(
            codec,
            group=group,
            error_feedback=error_feedback,
            sides=sides,
            collective=collective,
            small=small,
            segment=segment,
            dynamic=dynamic,
            warmup_steps=warmup_steps,
            timeout=timeout,
            inline=inline,
        )
        self._failed: BaseException | None = None
        self._times = Times()
        self._jobs: SimpleQueue[Job | Compressor | None] = SimpleQueue()
        self._stream, self._device = OwnStream(), torch.device("cpu")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="robustdist-comm", daemon=True)
        if not self.inline:
            self._thread.start()

    # --- for the thread of the caller

    def submit(
        self,
        grads: Mapping[str, Tensor],
        buffer: Tensor,
        *,
        step: int,
        note: Sequence[float] = (),
        used: Collection[str] | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Enqueue a bucket.

        Args:
            grads: Gradients by name of parameter, views of ``buffer``, equal names and shapes on all ranks.
            buffer: What the future gives back, with the means in the place of the gradients.
            step: Number of the synchronised step.
            note: A few numbers, as many on all ranks, whose means travel with the bucket in float32; once the future
                is done they are in ``self.note``, the same bits on all ranks.
            used: For a ``dynamic`` engine: parameters that have a gradient on this rank; others of the bucket may hold
                one of an earlier step. By default those whose gradient has an entry other than zero.
        """
        self._check_open()
        future = self._stream.future(buffer.device)
        known = None if used is None else frozenset(used)
        job = Job(dict(grads), buffer, future, step, tuple(map(float, note)), perf_counter(), known)
        if self.inline:
            self._work(job)
        else:
            self._jobs.put(job)
        return future

    def change(self, codec: Compressor) -> None:
        """Use another codec for the buckets submitted from now on; all ranks must call it at the same place.

        Residuals stay: they are in units of the gradient.

        Raises:
            UsageError: If the codec needs another kind of memory than the present one; on all ranks, from the next
                bucket on, if they do not change to the same codec.
        """
        self._check_open()
        codec = self.check(codec)
        if self.inline:
            self._attempt(codec, partial(self.use, codec))
        else:
            self._jobs.put(codec)

    def report(self, error: Exception) -> Exception:
        """Tell the other ranks that this one failed outside of the engine, so that none waits for it.

        Returns:
            The error, or one that says which ranks do not answer; what all ranks know already is not told.
        """
        return self._wire.tell(error)

    def close(self, *, seconds: float = 30.0) -> None:
        """End the thread, if there is one, once all buckets are done; destroy the group if the engine made it.

        Args:
            seconds: How long to wait without seeing a bucket done. A thread that still waits for other ranks then is
                left to the end of the process, with a warning.
        """
        self._closed = True
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

    def bucket_times(self) -> list[Group]:
        """Return the buckets of the last step that are done, with the seconds that they took and were waited for.

        ``begin`` is when the thread took the bucket, ``end`` when its mean was there; ``exposed`` counts from the last
        submission on, when the backward pass is taken to have ended.
        """
        return self._times.groups()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine was closed: make a new one")

    # --- without a thread

    def _work(self, job: Job) -> None:
        """Take a bucket through all stages; the host waits only for a device that it has to ask something."""
        self._device = job.buffer.device
        with self._stream.after_caller(self._device):
            under_way: deque[tuple[Job, float, Callable[[], None]]] = deque()
            self._begin(job, under_way)
            for item in under_way:
                self._end(*item)

    def _settle(self) -> None:
        if not self.inline:
            super()._settle()
            return
        try:
            with self._stream.after_caller(self._device):
                self._wire.wait_for_stream(self._device)
                super()._settle()
        except RankError as error:
            self._failed = self._failed or error
            raise

    # --- for the thread of the engine

    def _run(self) -> None:
        torch.set_num_threads(1)
        under_way: deque[tuple[Job, float, Callable[[], None]]] = deque()
        while True:
            # to wait is what is done last; the order of collectives is that of the jobs in any case
            if under_way and self._jobs.empty():
                self._end(*under_way.popleft())
                continue
            job = self._jobs.get()
            if isinstance(job, Job):
                self._begin(job, under_way)
            elif job is not None:
                self._attempt(job, partial(self.use, job))
            else:
                break
        for item in under_way:
            self._end(*item)

    def _attempt(self, job: Job | Compressor, work: Callable[[], None]) -> None:
        try:
            if self._failed is not None:
                raise self._failed
            self._wire.listen()
            with torch.no_grad():
                work()
        except Exception as error:  # whatever it is, backward has to end with it
            self._failed = self._failed or self._wire.tell(error)
            if isinstance(job, Job):
                job.future.set_exception(self._failed)  # type: ignore[arg-type]  # its annotation asks for a result

    def _begin(self, job: Job, under_way: deque[tuple[Job, float, Callable[[], None]]]) -> None:
        def work() -> None:
            begin = perf_counter()
            if job.step != self._times.step:
                self.settle()
            self.stats.begun += 1
            finish = self.reduce(job)
            if finish is None:
                self._done(job, begin)
            else:
                under_way.append((job, begin, finish))

        self._attempt(job, work)

    def _end(self, job: Job, begin: float, finish: Callable[[], None]) -> None:
        def work() -> None:
            finish()
            self._done(job, begin)

        self._attempt(job, work)

    def _done(self, job: Job, begin: float) -> None:
        self.stats.calls += 1
        self.stats.steps += job.step != self._times.step
        end = perf_counter()
        self._times.add(job, begin, end)
        self.stats.seconds += end - begin
        job.future.set_result(job.buffer)
