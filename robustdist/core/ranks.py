"""What all processes of a run have to agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from robustdist.errors import UsageError

__all__ = ["failing_together", "gathered"]

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """Return the ``value`` of every process, in the order of ranks; it must be picklable.

    A collective of the default group: all processes must enter. Without a group the list has one entry.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on every process the :class:`UsageError` that any process raises inside.

    Without it the others would wait for the failed one until a time-out, with a message about sockets. A collective:
    all processes of the default group must enter, and only once they all have something to check.
    """
    own: UsageError | None = None
    try:
        yield
    except UsageError as error:
        own = error
    messages = gathered(None if own is None else str(own))
    message = next((f"{text} (process {rank})" for rank, text in enumerate(messages) if text is not None), None)
    if len(set(messages)) == 1:
        message = messages[0]
    if message is not None:
        together = UsageError(message)
        together.shared = True
        raise together from own
