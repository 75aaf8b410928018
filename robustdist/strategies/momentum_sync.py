"""OneBitAdam in training: its momenta are averaged instead of gradients, once its variance is frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from robustdist._lightning import Trainer
from robustdist.comm import MomentumReducer
from robustdist.comm.residual_state import Residuals, load_residuals, save_residuals
from robustdist.errors import UsageError
from robustdist.optim import OneBitAdam

__all__ = ["MomentumSync"]


class MomentumSync:
    """Gives a :class:`~robustdist.optim.OneBitAdam` its averaging over ranks, and knows when gradients need none.

    Args:
        optimizer: The optimiser, which has no averaging of its own.
        **options: Of the engine that averages.
    """

    def __init__(self, optimizer: OneBitAdam, **options: Any) -> None:
        self.optimizer = optimizer
        self.reducer = optimizer.reduce = MomentumReducer(**options)

    @classmethod
    def find(
        cls, optimizers: Sequence[Optimizer], trainer: Trainer, scaler: Any, **options: Any
    ) -> MomentumSync | None:
        """Return one for the OneBitAdam among the optimisers, or None.

        Raises:
            UsageError: If something in the Trainer would make ranks differ, since each has a gradient of its own.
        """
        found = [optimizer for optimizer in optimizers if isinstance(optimizer, OneBitAdam)]
        if not found:
            return None
        if len(optimizers) > 1:
            raise UsageError("OneBitAdam must be the only optimiser: DDP averages the gradients of all, or of none")
        if trainer.gradient_clip_val:
            raise UsageError(
                "OneBitAdam and gradient_clip_val exclude each other, since every process would clip its own gradient: "
                "leave out gradient_clip_val"
            )
        if scaler is not None:
            raise UsageError(
                "OneBitAdam and precision='16-mixed' exclude each other, since every process would skip steps of its "
                "own: use bf16-mixed or 32"
            )
        return cls(found[0], **options)

    @property
    def wants_gradients(self) -> bool:
        """Whether the gradients of the present step have to be averaged."""
        return self.optimizer.wants_gradient_sync()

    def add_stats(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return counters with those of the momenta added."""
        own = self.reducer.engine.comm_stats()
        total = {name: value + own.get(name, 0.0) for name, value in stats.items()}
        total["ratio"] = total["bytes_dense"] / total["bytes_sent"] if total["bytes_sent"] else 1.0
        return total

    def state_dict(self, mode: Residuals, device: torch.device) -> dict[str, Any]:
        """Return the residuals; a collective unless ``mode`` is "reset"."""
        memory = self.reducer.engine.memory
        vectors = {} if memory is None else memory.state_dict()["residual"]
        sizes = {name: len(vector) for name, vector in vectors.items()}
        return {"calls": self.reducer.calls, **save_residuals(self.reducer.engine, mode, sizes, device=device)}

    def load_state_dict(self, state: Mapping[str, Any], rank: int) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.reducer.calls = state["calls"]
        load_residuals(self.reducer.engine, state, rank)

    def close(self) -> None:
        """End the averaging."""
        self.optimizer.reduce = None
        self.reducer.close()
