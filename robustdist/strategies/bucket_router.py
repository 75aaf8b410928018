"""DDP's buckets become the buckets of the engine: as they are, or cut and joined into planned groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["BucketRouter", "Names"]

Names: TypeAlias = tuple[str, ...]
Future: TypeAlias = torch.futures.Future[Tensor]

#: Takes gradients by name and a buffer, gives a future of that buffer.
Submit: TypeAlias = Callable[[dict[str, Tensor], Tensor], Future]


@dataclass
class _Waiting:
    """A bucket of DDP of which some gradients are in groups that are not complete yet."""

    future: Future
    buffer: Tensor
    missing: set[str]


class BucketRouter:
    """Submits gradients in groups; a group goes out when DDP has handed over all of it, in one piece.

    Buckets arrive in the same order on all ranks, so groups leave in the same order too.

    Args:
        groups: Names of every group, in the order in which their gradients become ready; empty for DDP's own buckets.
        join: Whether a group may wait for several buckets. Without it, groups only cut buckets that consist of them.

    Attributes:
        sent: The groups of the present step, in order; after a step, those of the step.
    """

    def __init__(self, groups: Sequence[Names] = (), *, join: bool = False) -> None:
        self.groups, self.join = [tuple(names) for names in groups], join
        self.sent: list[Names] = []
        self._ready: dict[str, Tensor] = {}
        self._left: list[Names] = []
        self._waiting: list[_Waiting] = []

    def route(
        self, grads: Mapping[str, Tensor], buffer: Tensor, submit: Submit, *, is_first: bool, is_last: bool
    ) -> Future:
        """Submit what is complete with this bucket, and return the future of the bucket.

        Args:
            grads: Gradients by name, views of ``buffer``.
            buffer: What the future gives.
            submit: Takes the gradients of a group, and one of the buffers.
            is_first: Whether the bucket is the first one of a step.
            is_last: Whether it is the last one: whatever is left then forms a group.
        """
        if is_first:
            # what an exception in the middle of a step left behind is gone
            self.sent, self._ready, self._left, self._waiting = [], {}, list(self.groups), []
        self._ready.update(grads)
        future: Future | None = None
        for names in self._complete(grads, is_last=is_last):
            future = submit({name: self._ready.pop(name) for name in names}, buffer)
            self.sent.append(names)
            self._release(names, future)
        missing = set(grads) & set(self._ready)
        if future is not None and not missing:
            return future  # the engine keeps the order: the last one of them is the last to be done
        waiting = _Waiting(torch.futures.Future(), buffer, missing)
        self._waiting.append(waiting)
        return waiting.future

    def _complete(self, grads: Mapping[str, Tensor], *, is_last: bool) -> list[Names]:
        """Return the groups that go out now."""
        complete = [names for names in self._left if all(name in self._ready for name in names)]
        if not self.join:
            # DDP's bucket as it is, unless it is exactly some of the groups
            return complete if sum(map(len, complete)) == len(grads) else [tuple(grads)]
        self._left = [names for names in self._left if names not in complete]
        taken = {name for names in complete for name in names}
        rest = tuple(name for name in self._ready if name not in taken)
        return [*complete, rest] if is_last and rest else complete

    def _release(self, names: Names, future: Future) -> None:
        """Let buckets go whose last missing gradients are in a group on its way."""
        for waiting in self._waiting:
            waiting.missing.difference_update(names)
            if not waiting.missing:
                future.add_done_callback(_passing_on(waiting))
        self._waiting = [waiting for waiting in self._waiting if waiting.missing]


def _passing_on(waiting: _Waiting) -> Callable[[Future], None]:
    """Return a callback that gives a bucket its end, good or bad; it neither waits nor communicates."""

    def pass_on(done: Future) -> None:
        try:
            done.value()
        except Exception as error:  # it belongs to backward, which waits for this bucket
            waiting.future.set_exception(error)  # type: ignore[arg-type]  # its annotation asks for a result
        else:
            waiting.future.set_result(waiting.buffer)

    return pass_on
