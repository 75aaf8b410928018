"""What all processes of a run have to agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from robustdist.errors import UsageError

__all__ = ["failing_together"]


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
    message = None if own is None else str(own)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
        message = next((f"{text} (process {rank})" for rank, text in enumerate(messages) if text is not None), None)
        if len(set(messages)) == 1:
            message = messages[0]
    if message is not None:
        together = UsageError(message)
        together.shared = True
        raise together from own
