"""How the other processes learn that one of them refuses a batch."""

from __future__ import annotations

import uuid

import torch.distributed as dist

from robustdist._lightning import Trainer
from robustdist.core.roll_call import RollCall

__all__ = ["open_roll_call"]


def open_roll_call(trainer: Trainer) -> RollCall | None:
    """Listen to the other processes of the run; None for one process, and where the strategy does so itself.

    Only the first batch is rehearsed together: later ones must not cost a collective. A process that refuses one of
    them ends, the connections of the others break, and from the store they learn whose text it was.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None or trainer.world_size == 1 or getattr(trainer.strategy, "engine", None) is not None:
        return None
    return RollCall(group, trainer.strategy.broadcast(uuid.uuid4().hex))
