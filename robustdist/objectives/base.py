"""What an objective sees, with or without a Trainer."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.core.forward import as_logits

__all__ = ["Objective", "ObjectiveContext"]


@dataclass
class ObjectiveContext:
    """One batch as an objective sees it.

    Attributes:
        x: Clean inputs, shape (batch, ...).
        y: Targets.
        attack: Maps (x, y) to adversarial inputs; local to the process.
        loss: Maps inputs to the ordinary training loss, a scalar with a graph. The first call of a step is the one
            whose logs and metrics the user sees; later ones leave none.
        logits: Maps inputs to logits, with a graph.
        logs: Scalars that the objective wants logged under ``robust/``.
    """

    x: Tensor
    y: Any
    attack: Callable[[Tensor, Any], Tensor]
    loss: Callable[[Tensor], Tensor | None]
    logits: Callable[[Tensor], Tensor]
    logs: dict[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """Base of all objectives: the outer loss of adversarial training.

    Without a Trainer: ``loss = objective(model, x, y, attack=attack)``, a scalar with a graph.
    """

    #: Whether the ordinary loss is evaluated more than once per batch; manual optimisation cannot do that.
    needs_second_pass = False

    @abstractmethod
    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the scalar to minimise, or None when the ordinary loss asked to skip the batch."""

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Any,
        *,
        attack: Attack,
        loss_fn: Callable[[Tensor, Any], Tensor] = F.cross_entropy,
        rank: int = 0,
        step: int = 0,
    ) -> Tensor:
        """Return the objective of a plain module.

        Args:
            model: Maps inputs to logits.
            x: Inputs, shape (batch, ...).
            y: Targets as ``loss_fn`` takes them.
            attack: The inner maximiser.
            loss_fn: Ordinary loss of (logits, y), a scalar.
            rank: Global rank, part of the attack's random key.
            step: Number of this call, part of the attack's random key.
        """
        context = ObjectiveContext(
            x=x,
            y=y,
            attack=lambda x, y: attack(model, x, y, rank=rank, step=step),
            loss=lambda x: loss_fn(as_logits(model(x)), y),
            logits=lambda x: as_logits(model(x)),
        )
        loss = self.compute(context)
        assert loss is not None  # only a user's training_step can skip a batch
        return loss

    def __repr__(self) -> str:
        accepted = inspect.signature(type(self)).parameters
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name in accepted)
        return f"{type(self).__name__}({arguments})"
