"""The process group of an engine: waiting for other ranks, and hearing of their failures."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import perf_counter, sleep
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.bitpack import pack, unpack
from robustdist.comm.cost import dense_bytes
from robustdist.comm.jobs import Stats
from robustdist.core.roll_call import RollCall
from robustdist.errors import UsageError

__all__ = ["RankError", "Wire"]

#: How long a wait for the network goes on before it is looked whether another rank has called.
_SLICE = timedelta(seconds=0.5)


class RankError(RuntimeError):
    """Another rank, or this one, failed in the communication thread; the text names it."""


class Wire:
    """A process group that one thread uses, whose waits end when another rank has failed.

    Args:
        group: A group for this alone; by default a new one of all ranks, which all of them must make.
        timeout: Seconds after which a collective of the new group fails; by default those of torch.
        stats: Where bytes and seconds are counted.

    Raises:
        UsageError: If ``timeout`` is not positive or the group is not a new one.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None, stats: Stats) -> None:
        if timeout is not None and group is not None:
            raise UsageError(f"timeout={timeout!r} is for the engine's own group: give it to the group that you made")
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout={timeout!r} must be a positive number of seconds")
        self._own = group is None
        if group is None:
            limit = None if timeout is None else timedelta(seconds=timeout)
            group = cast("dist.ProcessGroup", dist.new_group(timeout=limit))
        self.group, self.stats = group, stats
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.nccl = "nccl" in str(dist.get_backend(group))
        self._roll_call: RollCall | None = None

    def open(self, settings: str) -> None:
        """Compare the settings of the ranks, then listen to them.

        Raises:
            UsageError: On all ranks, if the settings differ.
        """
        name = self.compare(settings)
        if self.world_size > 1:
            self._roll_call = RollCall(self.group, name, lambda: self.stats.begun)

    def close(self, *, healthy: bool) -> None:
        """Stop listening; destroy the group if it is a new one and still good for anything."""
        if self._roll_call is not None:
            self._roll_call.close()
        if self._own and healthy and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self._own = False

    # --- collectives

    def compare(self, settings: str) -> str:
        """Raise if the settings of the ranks differ; return a text that no other call on any rank returns."""
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, (settings, uuid.uuid4().hex), group=self.group)
        if len({answer[0] for answer in answers}) > 1:
            told = "; ".join(f"rank {rank}: {answer[0]}" for rank, answer in enumerate(answers))
            error = UsageError(f"compressor: the ranks have different settings, give all of them the same ({told})")
            error.shared = True
            raise error
        return str(answers[0][1])

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective in flight, and count the time.

        A rank may wait for a live one that waits for a dead one: it hears of it from the roll call.
        """
        begin = perf_counter()
        while not self._arrived(work):
            self.listen()
        self.stats.wait_seconds += perf_counter() - begin

    def _arrived(self, work: dist.Work) -> bool:
        try:
            return work.wait(_SLICE)
        except RuntimeError:
            return work.is_completed() and work.wait()  # raises what went wrong, unless it has just arrived

    def sum(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replace values by their sum over the ranks, or by what another operation makes of them."""
        self._begin(values, op)()

    def _begin(self, values: Tensor, op: Any) -> Callable[[], None]:
        """Start an all-reduce, and return what waits for it."""
        work = dist.all_reduce(values, op, group=self.group, async_op=True)
        self.stats.bytes_sent += int(dense_bytes(values.numel(), self.world_size) / 4 * values.element_size())
        # on a device it is the stream that waits, not this thread
        return partial(self.wait if values.device.type == "cpu" else _on_stream, work)

    def either(self, bits: Tensor, device: torch.device) -> None:
        """Replace bytes by their bitwise OR over the ranks.

        Args:
            bits: On the CPU.
            device: Where NCCL, which has neither bitwise operations nor tensors of the CPU, can take their bits.
        """
        if not self.nccl:
            self.sum(bits, dist.ReduceOp.BOR)
            return
        flags = torch.empty(8 * len(bits), dtype=torch.uint8)
        unpack(bits, 1, flags)
        there = flags.to(device)
        self.sum(there, dist.ReduceOp.MAX)
        pack(there.cpu(), 1, bits)

    def begin_mean(self, values: Tensor) -> Callable[[], None]:
        """Begin to replace values by their mean over the ranks, and return what waits for it."""
        values.mul_(1 / self.world_size)
        return self._begin(values, dist.ReduceOp.SUM)

    def wait_for_stream(self, device: torch.device) -> None:
        """Let this thread wait for the present stream of a device, and hear of failures meanwhile."""
        if device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            self.listen()
            sleep(1e-4)

    # --- failures

    def confess(self, error: Exception | None) -> None:
        """Raise on all ranks what went wrong on any; all of them must know that something did."""
        texts: list[str | None] = [None] * self.world_size
        own = None if error is None else "".join(traceback.format_exception(error))
        dist.all_gather_object(texts, own, group=self.group)
        told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        raise RankError("communication failed\n" + "\n".join(told)) from error

    def listen(self) -> None:
        """Raise if another rank has found that something is wrong."""
        if self._roll_call is not None and self._roll_call.called:
            raise RankError(f"communication failed: {self._roll_call.call()}")

    def tell(self, error: Exception) -> Exception:
        """Let the other ranks know of a failure that they do not see; return it with the ranks that are missing."""
        if self._roll_call is None or isinstance(error, RankError) or getattr(error, "shared", False):
            return error
        text = "".join(traceback.format_exception_only(error)).strip()
        told = RankError(f"communication failed: {self._roll_call.call(text)}")
        told.__cause__ = error
        return told


def _on_stream(work: dist.Work) -> None:
    work.wait()
