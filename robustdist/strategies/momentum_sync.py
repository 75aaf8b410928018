"""OneBitAdam in training: its momenta are averaged instead of gradients, once its variance is frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from robustdist._lightning import Trainer
from robustdist.comm import MomentumReducer
from robustdist.comm.residual_state import Change, Residuals, Shapes, load_residuals, map_residuals, save_residuals
from robustdist.errors import UsageError
from robustdist.optim import OneBitAdam

__all__ = ["MomentumSync"]


class MomentumSync:
    """Gives a :class:`~robustdist.optim.OneBitAdam` its averaging over ranks, and knows when gradients need none.

    Args:
        optimizer: The optimiser, which has no averaging of its own.
        names: Names of the parameters in the module, by identity.
        **options: Of the engine that averages.
    """

    def __init__(self, optimizer: OneBitAdam, names: Mapping[int, str], **options: Any) -> None:
        self.optimizer = optimizer
        # its own may lack a prefix, or be numbers
        self._names = {own: names[id(parameter)] for own, parameter, _ in optimizer.named() if id(parameter) in names}
        self.reducer = optimizer.reduce = MomentumReducer(**options)

    @classmethod
    def find(
        cls, optimizers: Sequence[Optimizer], trainer: Trainer, scaler: Any, names: Mapping[int, str], **options: Any
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
        return cls(found[0], names, **options)

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

    def map_residuals(self, change: Change, shapes: Shapes, device: torch.device) -> Shapes:
        """Change what is kept of the momenta; a collective, see :func:`robustdist.comm.residual_state.map_residuals`.

        Args:
            change: Takes names in the module and tensors in the shape of the parameter.
            shapes: Shapes of the parameters, by these names.
            device: One on which the default group can communicate.

        Returns:
            The new shapes of the parameters that something is kept of.
        """
        new: Shapes = {}

        def change_padded(own: str, vector: Tensor) -> Tensor | None:
            if own not in self._names:
                return vector
            name = self._names[own]
            changed = change(name, vector[: math.prod(shapes[name])].view(shapes[name]))
            if changed is None:
                return None
            new[name] = tuple(changed.shape)
            return self.reducer.padded(changed)

        engine = self.reducer.engine
        vectors = {} if engine.memory is None else engine.memory.state_dict()["residual"]
        map_residuals(engine, change_padded, {own: (len(vector),) for own, vector in vectors.items()}, device=device)
        return new

    def close(self) -> None:
        """End the averaging."""
        self.optimizer.reduce = None
        self.reducer.close()
