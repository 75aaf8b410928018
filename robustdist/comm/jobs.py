"""What the communication thread is given, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robustdist.comm.grouping import Group, expose

__all__ = ["Job", "Stats"]


@dataclass
class Job:
    """A bucket on its way: gradients by name (views of ``buffer``), and the future that gets ``buffer``.

    ``used`` are the names that a ``dynamic`` engine takes to have a gradient here; None to look at the values.
    """

    grads: Mapping[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    step: int
    note: tuple[float, ...]
    submitted: float
    used: frozenset[str] | None = None


@dataclass
class Times:
    """When the buckets of one step were submitted, begun and done, on the clock of this process."""

    step: int | None = None
    names: list[tuple[str, ...]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    moments: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, job: Job, begin: float, end: float) -> None:
        """Add a bucket that is done; the first one of another step replaces those of the last."""
        if job.step != self.step:
            self.step, self.names, self.num_bytes, self.moments = job.step, [], [], []
        self.names.append(tuple(job.grads))
        self.num_bytes.append(sum(grad.numel() * grad.element_size() for grad in job.grads.values()))
        self.moments.append((job.submitted, begin, end))

    def groups(self) -> list[Group]:
        """Return the buckets with their times from the first submission on.

        The backward pass counts as ended with the last submission.
        """
        if not self.moments:
            return []
        start, last = self.moments[0][0], self.moments[-1][0]
        exposed = expose([end for *_, end in self.moments], last)
        return [
            Group(names, size, ready - start, begin - start, end - start, seconds)
            for names, size, (ready, begin, end), seconds in zip(
                self.names, self.num_bytes, self.moments, exposed, strict=True
            )
        ]


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
