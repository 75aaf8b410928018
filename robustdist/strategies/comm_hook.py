"""What DDP calls with every bucket of gradients.

DDP compares the annotations of a hook with its own classes, so they must not be text: no postponed annotations here.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # its stubs lack what needs a build with c10d

__all__ = ["CommHook", "GradBucket", "make_hook"]

CommHook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]


def make_hook(reduce: Callable[[GradBucket], torch.futures.Future[Tensor]]) -> CommHook:
    """Return a function that ``register_comm_hook`` accepts and that hands every bucket to ``reduce``."""

    def compressed_communication(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return reduce(bucket)

    return compressed_communication
