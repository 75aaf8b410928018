"""The memory of an objective in a checkpoint."""

from __future__ import annotations

from typing import Any

from robustdist._lightning import Trainer, rank_zero_warn
from robustdist.core.ranks import gathered
from robustdist.errors import RobustDistWarning
from robustdist.objectives.base import Objective

__all__ = ["load_objective", "objective_states"]


def objective_states(objective: Objective) -> list[dict[str, Any]]:
    """Return the state of ``objective``, of every process where they differ; empty if there is none.

    A collective where they differ: every process must call it, as all do that save a checkpoint.
    """
    state = objective.state_dict()
    states = gathered(state) if objective.state_is_per_rank else [state]
    return states if any(states) else []


def load_objective(objective: Objective, states: list[dict[str, Any]], trainer: Trainer) -> None:
    """Give ``objective`` its state back; one that belongs to processes is dropped when their number has changed."""
    if not objective.state_is_per_rank:
        objective.load_state_dict(states[0])
    elif len(states) == trainer.world_size:
        objective.load_state_dict(states[trainer.global_rank])
    else:
        rank_zero_warn(
            f"the checkpoint is of {len(states)} processes and this run has {trainer.world_size}: "
            f"{type(objective).__name__} starts without its memory",
            category=RobustDistWarning,
        )
