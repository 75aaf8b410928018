"""What a rank does for ``robustdist bench comm --level allreduce``: the same gradients, averaged in several ways."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from robustdist.bench.comm_rows import HOOK_RANK, ROWS, SMALL, Row, gradient_shapes
from robustdist.bench.links import sent_by, transfer_rate
from robustdist.comm.cost import dense_bytes
from robustdist.comm.engine import CommEngine
from robustdist.core.rng import derive_seed

__all__ = ["measure"]

_MIB = 2**20


class Bucket:
    """Gradients of a bucket, with the methods of DDP's own that torch's hooks call."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], place: int, last: bool) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        self.noise = torch.empty(sum(sizes))
        self._buffer = torch.empty(sum(sizes))
        parts = zip(shapes.items(), torch.split(self._buffer, sizes), strict=True)
        self.grads = {name: part.view(shape) for (name, shape), part in parts}
        self._place, self._last = place, last

    def refill(self) -> None:
        """Put the gradients of this rank back where the means are."""
        self._buffer.copy_(self.noise)

    def buffer(self) -> Tensor:
        """Return the flat buffer."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients by parameter."""
        return list(self.grads.values())

    def index(self) -> int:
        """Return the place of the bucket."""
        return self._place

    def is_last(self) -> bool:
        """Whether no bucket follows."""
        return self._last


def make_buckets(numel: int, *, one_bucket: bool) -> list[Bucket]:
    """Cut ``numel`` elements into matrices and those into buckets: the first of 1 MiB or more, others of 25."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    cap, size = _MIB, 0
    for number, shape in enumerate(gradient_shapes(numel)):
        if size >= cap and not one_bucket:
            groups.append({})
            cap, size = 25 * _MIB, 0
        groups[-1][f"layer{number}.weight"] = shape
        size += 4 * torch.Size(shape).numel()
    return [Bucket(group, place, place == len(groups) - 1) for place, group in enumerate(groups)]


class Reducer(ABC):
    """One way to average; made anew for every visit, so that rows do not add up in memory.

    Attributes:
        judged: The step whose result is compared with the exact mean, in the first visit.
    """

    judged = 0

    def warm_up(self, number: int) -> int:
        """Return how many steps are not timed in visit ``number``; more than ``judged`` in the first."""
        return 1

    @abstractmethod
    def reduce(self, buckets: Sequence[Bucket], step: int) -> None:
        """Put the means into the buffers."""

    def bytes_sent(self) -> float | None:
        """Return what the row itself counts, or None."""
        return None

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Plain(Reducer):
    """As DDP does without a hook."""

    def warm_up(self, number: int) -> int:
        """Return 0 from the second visit on: there is no state."""
        return int(number == 0)

    def reduce(self, buckets: Sequence[Bucket], step: int) -> None:
        """Divide and sum."""
        works = []
        for bucket in buckets:
            bucket.buffer().div_(dist.get_world_size())
            works.append(dist.all_reduce(bucket.buffer(), async_op=True))
        for work in works:
            work.wait()


class Hook(Reducer):
    """A hook of torch's."""

    def __init__(self, kind: str) -> None:
        self.state: Any = None
        self.hook: Any = default_hooks.fp16_compress_hook
        if kind == "powersgd":
            self.judged = 2  # it sends the first two steps as they are
            self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=HOOK_RANK, start_powerSGD_iter=2)
            self.hook = powerSGD_hook.powerSGD_hook

    def warm_up(self, number: int) -> int:
        """Return one step that is as those that are timed."""
        return self.judged + 1

    def reduce(self, buckets: Sequence[Bucket], step: int) -> None:
        """Call it per bucket, then wait as backward does."""
        futures = [self.hook(self.state, bucket) for bucket in buckets]
        for bucket, future in zip(buckets, futures, strict=True):
            value = future.wait()
            if value.data_ptr() != bucket.buffer().data_ptr():
                bucket.buffer().copy_(value)

    def bytes_sent(self) -> float | None:
        """Return what PowerSGD counts, in all-reduces of float32; the first steps, as they are, it does not count."""
        if self.state is None:
            return None
        return dense_bytes(self.state.total_numel_after_compression, dist.get_world_size())


class Engine(Reducer):
    """This package."""

    def __init__(self, row: Row) -> None:
        self.engine = CommEngine(row.codec(), error_feedback=row.error_feedback, small=SMALL)

    def warm_up(self, number: int) -> int:
        """Return 2 with residuals: they take turns between two vectors."""
        return 1 if self.engine.memory is None else 2

    def reduce(self, buckets: Sequence[Bucket], step: int) -> None:
        """Submit all, wait for all, commit."""
        futures = [self.engine.submit(bucket.grads, bucket.buffer(), step=step) for bucket in buckets]
        for future in futures:
            future.wait()
        self.engine.commit()

    def bytes_sent(self) -> float:
        """Return the counter of the engine."""
        return self.engine.comm_stats()["bytes_sent"]

    def __exit__(self, *error: object) -> None:
        self.engine.close()


def make_reducer(row: Row) -> Reducer:
    """Return a new reducer of the row."""
    if row.kind == "plain":
        return Plain()
    return Engine(row) if row.kind == "engine" else Hook(row.kind)


def measure(numel: int, rows: list[str], rounds: int, repeats: int) -> dict[str, Any]:
    """Average ``numel`` gradients in all ways in turn.

    Every visit of a row begins with a step that is not timed, of which the very first gives the error; the reference
    keeps no state and has one only in the first round.

    Returns:
        ``rate`` of the link (rank 0), ``visits`` in order, and per row ``error`` and ``identical``.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rate = transfer_rate(rank)
    all_buckets = {one: make_buckets(numel, one_bucket=one) for one in {ROWS[key].one_bucket for key in rows}}
    firsts: dict[str, dict[str, Any]] = {}
    visits: list[dict[str, Any]] = []
    for buckets in all_buckets.values():
        _fill(buckets, rank)
    for number in range(rounds):
        for key in rows:
            row = ROWS[key]
            buckets = all_buckets[row.one_bucket]
            with make_reducer(row) as reducer:
                warm_up = reducer.warm_up(number)
                for step in range(warm_up):
                    _timed(reducer, buckets, step)
                    if (number, step) == (0, reducer.judged):
                        firsts[key] = _judge(buckets, world_size)
                for step in range(warm_up, warm_up + repeats):
                    visits.append({"row": key, "round": number, **_timed(reducer, buckets, step)})
                    if rank == 0:
                        print(f"round {number + 1}/{rounds}  {row.name}: {visits[-1]['seconds']:.2f} s", flush=True)
    dist.destroy_process_group()
    return {"rate": rate, "visits": visits, "firsts": firsts}


def _fill(buckets: Sequence[Bucket], rank: int) -> None:
    for bucket in buckets:
        bucket.noise.normal_(generator=_noise(rank, bucket.index()))


def _noise(rank: int, place: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(0, "bench comm", rank, place))


def _timed(reducer: Reducer, buckets: Sequence[Bucket], step: int) -> dict[str, Any]:
    for bucket in buckets:
        bucket.refill()
    dist.barrier()
    sent, counted = sent_by(), reducer.bytes_sent()
    cpu, wall = time.process_time(), time.perf_counter()
    reducer.reduce(buckets, step)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    dist.barrier()  # what the others still had to receive has left by now
    now, counted_now = sent_by(), reducer.bytes_sent()
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "nic_bytes": None if now is None or sent is None else now - sent,
        "payload_bytes": None if counted is None or counted_now is None else counted_now - counted,
    }


def _judge(buckets: Sequence[Bucket], world_size: int) -> dict[str, Any]:
    """Compare the means with exact ones, and the ranks with each other."""
    wrong = right = 0.0
    checksum = torch.zeros(1, dtype=torch.int64)
    for bucket in buckets:
        exact = torch.zeros_like(bucket.noise)
        for rank in range(world_size):
            noise = torch.empty_like(exact).normal_(generator=_noise(rank, bucket.index()))
            exact.add_(noise, alpha=1 / world_size)
        right += float(torch.linalg.vector_norm(exact)) ** 2
        wrong += float(torch.linalg.vector_norm(exact.sub_(bucket.buffer()))) ** 2
        checksum += bucket.buffer().view(torch.int32).sum(dtype=torch.int64)
    checksums = [torch.zeros_like(checksum) for _ in range(world_size)]
    dist.all_gather(checksums, checksum)
    return {"error": (wrong / right) ** 0.5, "identical": all(bool(other == checksum) for other in checksums)}
