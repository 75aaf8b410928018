"""What an objective sees, with or without a Trainer."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks.base import Attack, Problem
from robustdist.core.compiled import check_double_backward
from robustdist.core.forward import as_logits, guarded_logits
from robustdist.core.rng import Noise, derive_seed

__all__ = ["Objective", "ObjectiveContext"]


@dataclass
class ObjectiveContext:
    """One batch as an objective sees it.

    Attributes:
        x: Clean inputs, shape (batch, ...).
        y: Targets.
        attack: Maps (x, y) to adversarial inputs; local to the process. Keyword arguments are values that attributes of
            the attack have for this call; with ``attack_loss`` it draws random starts of its own.
        loss: Maps inputs to the ordinary training loss, a scalar with a graph. The first call of a step is the one
            whose logs and metrics the user sees; later ones leave none.
        logits: Maps inputs to logits, with a graph.
        loss_and_logits: Both at once, from one forward pass where the module's step allows it.
        reference: Maps inputs to logits without a graph, from the model as the attack sees it.
        problem: Returns the inner problem in pixel units, with logits that keep their graph, for objectives that
            differentiate through it; called once per batch, its noise is that of the attack.
        from_pixels: Maps pixel inputs back to the units of ``x``, differentiably.
        take: Maps (rows, y=None) to the context of some samples, with targets ``y`` in place of theirs. The losses of a
            part with other targets leave no logs.
        module: The module in training, for objectives that read or move its weights.
        progress: How far training is, in (0, 1]; 1 without a Trainer and where nobody asked (``follows_progress``).
        loss_scale: Factor against underflow of gradients of ``loss`` in half precision; 1 without a gradient scaler.
        logs: Scalars that the objective wants logged: under ``robust/``, or as it is for a key with a slash.
    """

    x: Tensor
    y: Any
    attack: Callable[..., Tensor]
    loss: Callable[[Tensor], Tensor | None]
    logits: Callable[[Tensor], Tensor]
    loss_and_logits: Callable[[Tensor], tuple[Tensor | None, Tensor]]
    reference: Callable[[Tensor], Tensor]
    problem: Callable[[], Problem]
    from_pixels: Callable[[Tensor], Tensor]
    take: Callable[..., ObjectiveContext]
    module: nn.Module
    progress: float = 1.0
    loss_scale: float = 1.0
    logs: dict[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """Base of all objectives: the outer loss of adversarial training.

    Without a Trainer: ``loss = objective(model, x, y, attack=attack)``, a scalar with a graph, then
    ``loss.backward()`` and ``objective.after_backward()``.
    """

    #: Whether the loss is more than one evaluation of the ordinary one; manual optimisation cannot have that.
    needs_second_pass = False
    #: Whether the inner problem takes the model's own logits on the clean inputs (``reference``) in place of targets.
    attacks_predictions = False
    #: Whether the loss holds a derivative already, so that its backward pass differentiates twice.
    needs_double_backward = False
    #: Whether ``after_backward`` reads a gradient: it must follow every loss, which manual optimisation cannot promise.
    reads_backward = False
    #: Whether ``progress`` matters, for which the length of training must be known.
    follows_progress = False
    #: Steps in a row that are made on one batch.
    replays = 1
    #: Whether the loss is one of its own in place of the module's.
    replaces_loss = False
    #: Whether the batch of one process may make it refuse a step that the others take; then all agree in every step.
    refuses_by_batch = False
    #: Whether the state belongs to the process, as perturbations of its own samples do.
    state_is_per_rank = False

    def check_module(self, module: nn.Module) -> None:
        """Refuse a module that this objective cannot train; called before training.

        Raises:
            UsageError: If the backward pass is compiled and the objective differentiates twice.
        """
        if self.needs_double_backward:
            check_double_backward(module, f"objective={type(self).__name__}")

    def adapt(self, attack: Attack) -> Attack:
        """Return the inner maximiser of this objective, made from the user's attack; by default that attack."""
        return attack

    def trial_targets(self, logits: Tensor, y: Any) -> Any:
        """Return targets with which the attack is tried on the first batch, given the logits of its clean inputs."""
        return logits if self.attacks_predictions else y

    def after_backward(self) -> None:
        """Undo what the loss's graph needed until its backward pass; called after every backward pass."""
        return

    def reset(self) -> None:
        """Forget what earlier steps left, at the start of a training."""
        return

    def follow_pruning(self, slice_like: Callable[[str, Tensor], Tensor | None]) -> None:
        """Cut what is kept of the module's weights, after some of them were removed.

        Args:
            slice_like: Takes the name of a parameter and a tensor of its former shape; returns what is left of it, or
                None if it cannot be cut.
        """
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs: tensors and plain values, empty for an objective without memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        return

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
        progress: float = 1.0,
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
            progress: Share of training that is done, for objectives that change with it.

        Raises:
            UsageError: If the objective cannot train ``model``, or the attack does not fit ``x`` and ``y``.
        """
        self.check_module(model)
        inner = self.adapt(attack)
        loss = self.compute(_plain_context(model, x, y, inner, loss_fn, Noise(inner.seed, rank, step), progress))
        assert loss is not None  # only a user's training_step can skip a batch
        return loss

    def __repr__(self) -> str:
        accepted = inspect.signature(type(self)).parameters
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name in accepted)
        return f"{type(self).__name__}({arguments})"


def _plain_context(
    model: nn.Module,
    x: Tensor,
    y: Any,
    inner: Attack,
    loss_fn: Callable[[Tensor, Any], Tensor],
    noise: Noise,
    progress: float,
) -> ObjectiveContext:
    """Return what an objective sees of a module without a Trainer."""

    def attack(x: Tensor, y: Any, **changes: Any) -> Tensor:
        if "attack_loss" in changes:
            changes["seed"] = derive_seed(inner.seed, "another loss")
        return (inner.variant(**changes) if changes else inner)(model, x, y, rank=noise.rank, step=noise.step)

    def loss_and_logits(inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = as_logits(model(inputs))
        return loss_fn(logits, y), logits

    def take(rows: Tensor, targets: Any = None) -> ObjectiveContext:
        return _plain_context(model, x[rows], y[rows] if targets is None else targets, inner, loss_fn, noise, progress)

    return ObjectiveContext(
        x=x,
        y=y,
        attack=attack,
        loss=lambda x: loss_and_logits(x)[0],
        logits=lambda x: as_logits(model(x)),
        loss_and_logits=loss_and_logits,
        reference=lambda x: guarded_logits(model, model, x, inner.model_mode),
        problem=lambda: inner.problem(model, x, y, noise),
        from_pixels=lambda pixels: inner.from_pixels(pixels, x),
        take=take,
        module=model,
        progress=progress,
    )
