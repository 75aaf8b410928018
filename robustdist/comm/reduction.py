"""What happens to a bucket of gradients on its way to the mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.agreement import used_anywhere
from robustdist.comm.base import Compressor
from robustdist.comm.bucket_ends import BucketEnds, make_ends
from robustdist.comm.buckets import Bucket, Buckets, Cut, Signature
from robustdist.comm.cast import Identity
from robustdist.comm.collectives import Chunked, Exchange, Gather, Key, Native, chunks, run_pipelined
from robustdist.comm.cost import Collective, choose, dense_bytes, keeps_residuals, segment_length
from robustdist.comm.error_feedback import ErrorFeedback, Memory
from robustdist.comm.jobs import Job, Stats
from robustdist.comm.layout import Layout, Place
from robustdist.comm.low_rank import PowerSGD
from robustdist.comm.overrides import check_overrides
from robustdist.comm.owner import OwnerResiduals
from robustdist.comm.power_iteration import LowRank, WarmStarts, is_low_rank
from robustdist.comm.verdicts import Verdicts, is_finite
from robustdist.comm.wire import Wire
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["Reduction", "check_warmup"]


class Reduction:
    """Codec, memories, layouts and process group, and the steps that a bucket goes through; no thread.

    Arguments and attributes are those of :class:`~robustdist.comm.engine.CommEngine`.
    """

    def __init__(
        self,
        codec: Compressor,
        *,
        group: dist.ProcessGroup | None,
        error_feedback: bool,
        sides: int,
        collective: Collective | Literal["auto"],
        small: int,
        segment: int | None,
        dynamic: bool,
        warmup_steps: int,
        timeout: float | None,
        inline: bool | None,
    ) -> None:
        self.error_feedback, self.sides, self.collective = error_feedback, sides, collective
        self.small = check_count(small, "small")
        self.segment = None if segment is None else check_count(segment, "segment")
        self.dynamic = dynamic
        self.warmup_steps = check_warmup(warmup_steps)
        self.num_steps = 0
        self.codec = self._usable(codec)
        self.memory = self._make_memory(self.codec)
        self.owned: OwnerResiduals | None = None
        if codec.has_memory:
            self.sides = 1  # a memory that is part of the method has no counterpart for the second rounding
        elif self.memory is not None and sides == 2:
            self.owned = OwnerResiduals()
        self._starts = WarmStarts()
        self.scale = 1.0
        self.note: tuple[float, ...] = ()
        self.nonfinite: str | None = None
        self.stats = Stats()
        self._wire = Wire(group, timeout, self.stats)
        self.rank, self.world_size = self._wire.rank, self._wire.world_size
        self.inline = self._wire.nccl if inline is None else inline
        self._verdicts = Verdicts(later=self.inline)
        self._unsettled: list[BucketEnds] = []
        self._answers: list[tuple[Tensor, Exception | None]] = []
        self._wire.open(self._settings())
        self._buckets = Buckets(self._cut, self._give_back)

    @property
    def dense(self) -> bool:
        """Whether gradients are averaged as they are in the present step, and nothing is kept of them."""
        return self.num_steps < self.warmup_steps

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the residuals of the step final, and count it: it was executed.

        Args:
            names: Parameters that were stepped, if not all.
        """
        self.settle()
        for memory in self._memories():
            memory.commit(names)
        self._starts.commit()
        self.num_steps += 1

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Put the residuals back: the step was skipped.

        Args:
            names: Parameters that were not stepped, if not all.
        """
        self.settle()
        for memory in self._memories():
            memory.rollback(names)
        self._starts.rollback()

    def settle(self) -> None:
        """Learn what came of the buckets since the last call: failures, notes, and means that are not finite.

        Only an ``inline`` engine leaves this to the end of a step, because the host has to wait for it. All ranks must
        call it at the same place; :meth:`commit` and :meth:`rollback` do.

        Raises:
            RankError: If a rank failed, on all of them.
        """
        if self.inline and (self._answers or self._unsettled):
            self._settle()

    def reset(self) -> None:
        """Forget all residuals."""
        for memory in self._memories():
            memory.reset()

    def check(self, codec: Compressor) -> Compressor:
        """Return a codec in the form in which :meth:`use` takes it.

        Raises:
            UsageError: If it needs another kind of memory than the present one.
        """
        codec = self._usable(codec)
        old, new = _kind(self.memory), _kind(self._make_memory(codec))
        if old != new:
            raise UsageError(f"compressor={codec!r} keeps {new}, the engine has {old}: make a new engine for it")
        return codec

    def use(self, codec: Compressor) -> None:
        """Go on with another codec; a bucket is laid out anew if its blocks or collectives are others with it."""
        self.codec = codec
        self._wire.compare(self._settings())
        self._buckets.recut()

    def reduce(self, job: Job) -> Callable[[], None] | None:
        """Replace the gradients of a bucket by their means; a collective.

        Returns:
            What is still to be done, without collectives, where nothing has to be decoded: waiting.
        """
        numel = sum(grad.numel() for grad in job.grads.values())
        self.stats.bytes_dense += dense_bytes(numel, self.world_size)
        if self.world_size == 1:
            self.note = job.note or self.note
            return None
        used, bits = job.grads, b""
        if self.dynamic:
            either = partial(self._wire.either, device=job.buffer.device)
            bits, used = used_anywhere(job.grads, either, job.used)
        if self.dense or isinstance(self.codec, Identity):
            return self._mean(job, used)
        bucket = self._buckets.find(job.grads, job.buffer, used, bits)
        layout, side = bucket.cut.layout, bucket.side(len(job.note) + 1)
        leftovers = self._leftovers(layout)
        errors: list[Exception] = []
        try:
            layout.load_sides(used, side)
            if self.memory is not None:
                for place in leftovers:
                    self.memory.prepare(place.name, place.of(side), scale=self.scale)
        except Exception as error:  # told to all ranks below
            errors.append(error)
        ends = make_ends(layout, used, self.codec, self.memory, scale=self.scale, verdicts=self._verdicts)
        exchanges = self._exchanges(bucket, ends, job)
        self.stats.bytes_sent += run_pipelined(exchanges)
        self.stats.codec_seconds += sum(exchange.codec_seconds for exchange in exchanges)
        errors += [exchange.error for exchange in exchanges if exchange.error is not None]
        self._meet(side, job.note, errors)
        self._spoilt(ends.finish())
        if self.inline:
            self._unsettled.append(ends)
        if self.memory is not None:
            for place in layout.sides:
                self.memory.dense(place.name, place.of(side), scale=self.scale)
            for place in leftovers:
                if is_finite(place.of(side)):
                    self.memory.update(place.name, *side.new_zeros(2, place.numel))
        layout.store_sides(side, used)
        return None

    def _mean(self, job: Job, used: Mapping[str, Tensor]) -> Callable[[], None]:
        """Average all of a bucket, which is what DDP does by itself, bit for bit, or the gradients that are used."""
        whole = len(used) == len(job.grads)
        values = job.buffer if whole else job.buffer.new_empty(sum(grad.numel() for grad in used.values()))
        parts = [] if whole else torch.split(values, [grad.numel() for grad in used.values()])
        for grad, part in zip(used.values(), parts, strict=not whole):
            part.view(grad.shape).copy_(grad)
        waits = [self._wire.begin_mean(values)] if len(values) else []
        note = torch.tensor(job.note, device=job.buffer.device)
        if job.note:
            waits.append(self._wire.begin_mean(note))

        def finish() -> None:
            for wait in waits:
                wait()
            for grad, part in zip(used.values(), parts, strict=not whole):
                grad.copy_(part.view(grad.shape))
            if self.memory is not None and self.codec.has_memory:
                for name, grad in used.items():  # a momentum that is part of the method
                    mean = grad.to(torch.float32, copy=True).view(-1)
                    grad.copy_(self.memory.dense(name, mean, scale=self.scale).view(grad.shape))
            if job.note:
                self._learn(torch.cat([note, note.new_zeros(1)]), None)

        return finish

    def _leftovers(self, layout: Layout) -> list[Place]:
        """Return the parameters that now travel whole and have a residual from when they did not."""
        memory = self.memory
        if not isinstance(memory, ErrorFeedback):
            return []
        return [place for place in layout.sides if (kept := memory.get(place.name)) is not None and kept.any()]

    def _cut(self, signature: Signature) -> Cut:
        """Lay parameters out and choose a collective for every segment."""
        if isinstance(self.codec, PowerSGD):
            whole = [name for name, shape in signature if not is_low_rank(self.codec, shape)]
            return Cut(Layout(signature, small=self.small, block=1, whole=whole), ())
        layout = Layout(signature, block=self.codec.block, small=self.small)
        segment = self._segment()
        sizes = [min(segment, layout.total - begin) for begin in range(0, layout.total, segment)]
        kinds = tuple(choose(self.codec, size, self.world_size, self.collective, self.sides) for size in sizes)
        return Cut(layout, kinds)

    def _segment(self) -> int:
        """Return the elements of a segment, a whole number of blocks."""
        length = self.segment
        if length is None:
            length = segment_length(self.codec, self.world_size, self.collective, self.sides)
        return -(-length // self.codec.block) * self.codec.block

    def _give_back(self, cut: Cut) -> None:
        """Let no owner keep anything of a chunk that is no longer its own."""
        if self.owned is not None and isinstance(self.memory, ErrorFeedback):
            self.owned.give_back(cut.layout, self._own_chunks(cut), self.memory, self.world_size)

    def _own_chunks(self, cut: Cut) -> list[tuple[int, int]]:
        """Begin and end of the chunks that this rank averages."""
        total, segment, own = cut.layout.total, self._segment(), list[tuple[int, int]]()
        for place, kind in enumerate(cut.kinds):
            if kind == "chunked":
                first = place * segment
                begin, end = chunks(min(segment, total - first), self.world_size, self.codec.block)[self.rank]
                own.append((first + begin, first + end))
        return own

    def _exchanges(self, bucket: Bucket, ends: BucketEnds, job: Job) -> list[Exchange]:
        """Cut the flat buffer into segments."""
        layout, segment, exchanges = bucket.cut.layout, self._segment(), list[Exchange]()
        wait = self._wire.wait if job.buffer.device.type == "cpu" else None
        common: dict[str, Any] = {"wait": wait, "device": job.buffer.device}
        if isinstance(self.codec, PowerSGD) and layout.places:
            what = (ends, 0, layout.total, self.codec, self._wire.group)
            return [LowRank(*what, places=layout.places, starts=self._starts, **common)]
        for place, kind in enumerate(bucket.cut.kinds):
            begin = place * segment
            numel = min(segment, layout.total - begin)
            key = Key(job.step, f"{layout.places[0].name}/{begin}")
            stretch = (ends, begin, numel, self.codec, self._wire.group, key)
            if kind == "chunked":
                owner = None if self.owned is None else self.owned.view(layout, self.scale, self._verdicts)
                exchanges.append(Chunked(*stretch, sides=self.sides, owner=owner, **common))
            else:
                exchanges.append((Gather if kind == "gather" else Native)(*stretch, **common))
        return exchanges

    def _meet(self, side: Tensor, note: tuple[float, ...], errors: list[Exception]) -> None:
        """Reduce the small parameters and the note; the last element counts failed ranks."""
        end = len(side) - 1 - len(note)
        if note:
            side[end:-1] = torch.tensor(note)
        side.mul_(1 / self.world_size)
        side[-1] = float(bool(errors))
        self._wire.sum(side)
        self._learn(side[end:], errors[0] if errors else None)

    def _learn(self, answer: Tensor, error: Exception | None) -> None:
        """Take the mean note and the count of failed ranks."""
        self._answers.append((answer.clone() if self.inline else answer, error))
        if not self.inline:
            self._settle()

    def _settle(self) -> None:
        answers, self._answers = self._answers, []
        ends, self._unsettled = self._unsettled, []
        told = [(answer.tolist(), error) for answer, error in answers]
        self._verdicts.settle()
        for each in ends:
            self._spoilt(each.undo_bad())
        failed = [error for values, error in told if values[-1] != 0]
        if failed:
            self._wire.confess(next((error for error in failed if error is not None), None))
        for values, _ in told:
            self.note = tuple(values[:-1]) or self.note

    def _spoilt(self, names: Collection[str]) -> None:
        """Undo what owners keep of parameters whose mean is not finite."""
        for name in names:
            self.nonfinite = name
            if self.owned is not None:
                self.owned.undo_parameter(name)

    def _settings(self) -> str:
        options = (self.error_feedback, self.sides, self.collective, self.small, self.segment, self.dynamic)
        rest = [f"warmup_steps={self.warmup_steps}"] if self.warmup_steps else []
        return repr((self.codec, *options, *rest, *(["inline"] if self.inline else [])))

    def _usable(self, codec: Compressor) -> Compressor:
        """Return the form of a codec that can be used here."""
        check_overrides(codec)
        if isinstance(codec, PowerSGD):
            if self.collective not in ("auto", "native"):
                raise UsageError(f"collective={self.collective!r} cannot add the factors of {codec!r}: use 'auto'")
            return codec
        codec = codec.contractive() if self.error_feedback and not codec.has_memory else codec
        choose(codec, 1, 2, self.collective, self.sides)
        return codec

    def _make_memory(self, codec: Compressor) -> Memory | None:
        kept = codec.has_memory or (self.error_feedback and keeps_residuals(codec))
        return codec.make_memory() if kept else None

    def _memories(self) -> list[Memory]:
        return [memory for memory in (self.memory, self.owned) if memory is not None]


def check_warmup(steps: int) -> int:
    """Return ``steps`` if it is a number of steps.

    Raises:
        UsageError: If it is not.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(f"warmup_steps={steps!r} must be a whole number of optimiser steps, or 0 for none")
    return steps


def _kind(memory: Memory | None) -> str:
    """Describe a memory by what must stay the same while it is in use."""
    if memory is None:
        return "no memory"
    settings = {name: value for name, value in vars(memory).items() if not name.startswith("_")}
    return f"{type(memory).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"
