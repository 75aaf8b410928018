"""One training step of the user's module, as an objective sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from robustdist._lightning import LightningModule
from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.core.containers import replaced
from robustdist.core.fast_path import FastPath
from robustdist.core.forward import as_logits, guarded_logits
from robustdist.core.muted import StepMuter
from robustdist.core.rng import Noise, derive_seed
from robustdist.core.rows import taken
from robustdist.core.space import View
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.losses import smoothed

__all__ = ["AttackCall", "ObjectiveStep", "the_loss_itself"]


@dataclass(frozen=True)
class AttackCall:
    """What the attack is told in this step: random key, factors of schedules and guards, scale of the loss."""

    rank: int
    step: int
    eps_scale: float = 1.0
    step_scale: float = 1.0
    grad_scale: float | None = None

    def settings(self, batch_size: int) -> dict[str, Any]:
        """Return the keyword arguments of ``Attack.run``."""
        return {
            "rank": self.rank,
            "step": self.step,
            "eps_scale": self.eps_scale,
            "step_scale": self.step_scale,
            # a gradient scaler keeps the gradient of a mean over the batch in range, the attack sums
            "loss_scale": 1.0 if self.grad_scale is None else self.grad_scale / max(1, batch_size),
        }


@dataclass
class ObjectiveStep:
    """One batch, the user's step on it, and the attack: the parts of an :class:`ObjectiveContext`.

    Attributes:
        module: The user's module, without its distributed wrapper.
        batch: The user's batch; never changed.
        look: Returns a batch as a point of the attacked space.
        next_step: Runs the user's ``training_step`` on another batch.
        attack: The inner maximiser.
        call: Its settings in this step.
        fast_path: How the forward passes of the attack run.
        muter: Silences all runs of the step but the first.
        inner_step: What the attack increases in place of a loss of the logits: maps a batch to a loss.
        label_smoothing: Share of the uniform distribution in the targets of the outer loss.
        channels_last: Whether images are given in channels-last order.
        progress: As in :class:`ObjectiveContext`.
        outputs: What the user's step returned so far in this step of the Trainer.
        guessed: Whether the targets are not the user's, so that no log must show them.
    """

    module: LightningModule
    batch: Any
    look: Callable[[Any], View]
    next_step: Callable[[Any], Any]
    attack: Attack
    call: AttackCall
    fast_path: FastPath
    muter: StepMuter
    inner_step: Callable[[Any], Any] | None = None
    label_smoothing: float = 0.0
    channels_last: bool = False
    progress: float = 1.0
    outputs: list[Any] = field(default_factory=list)
    guessed: bool = False

    def __post_init__(self) -> None:
        self.view = self.look(self.batch)
        self.x, self.y = self.view.x, self.view.y
        if self.channels_last and self.x.dim() == 4:
            self.x = self.x.contiguous(memory_format=torch.channels_last)

    def run(self, objective: Objective) -> tuple[Any, dict[str, Tensor]]:
        """Return what the Trainer gets from the step, and what the objective wants logged."""
        context = self.context()
        total = objective.compute(context)
        return (_with_loss(self.outputs[0], total) if self.outputs else total), context.logs

    def context(self) -> ObjectiveContext:
        """Return the step as an objective sees it."""
        return ObjectiveContext(
            x=self.x,
            y=self.y,
            attack=lambda x, y, **changes: self.run_attack(x, y, **changes).x_adv,
            loss=self._loss,
            logits=lambda inputs: as_logits(self.view(inputs)),
            loss_and_logits=self._loss_and_logits,
            reference=self.reference,
            problem=self._problem,
            from_pixels=lambda pixels: self.attack.from_pixels(pixels, self.x),
            take=lambda rows, y=None: self.take(rows, y).context(),
            module=self.module,
            progress=self.progress,
            loss_scale=1.0 if self.call.grad_scale is None else self.call.grad_scale,
        )

    def take(self, rows: Tensor, y: Any = None) -> ObjectiveStep:
        """Return the step on some samples of the batch, with other targets if ``y`` is given.

        Raises:
            UsageError: If the batch cannot be cut, or the module is in manual optimisation, where one step cannot be
                run in parts.
        """
        if not self.module.automatic_optimization:
            raise UsageError(
                "unlabelled samples are trained on apart from the others, which manual optimisation does not allow: "
                "set automatic_optimization=True"
            )
        paths = self.view.path, self.view.target_path
        batch = taken(self.batch, rows, len(self.x), *paths)
        if y is not None:
            batch = replaced(batch, paths[1], y)
        return replace(self, batch=batch, guessed=self.guessed or y is not None)

    def run_attack(self, x: Tensor, y: Any, **changes: Any) -> AttackResult:
        """Attack inputs of this batch, by the attack with other values of its attributes."""
        attack, forward, rowwise = self.attack, self._attacked, self.view.rowwise and self.inner_step is None
        if "attack_loss" in changes:
            # another inner problem of the same step: of the logits, with random starts of its own
            forward, rowwise = self.view, self.view.rowwise
            changes["seed"] = derive_seed(attack.seed, "another loss")
        attack = attack.variant(**changes) if changes else attack
        settings = self.call.settings(len(x))
        with self.fast_path.applied(self.module, attack.model_mode):
            return attack.run(self.module, x, y, forward=forward, rowwise=rowwise, **settings)

    def reference(self, x: Tensor) -> Tensor:
        """Return logits without a graph, from the module as the attack sees it."""
        return guarded_logits(self.module, self.view, x, self.attack.model_mode)

    def _problem(self) -> Problem:
        settings = self.call.settings(len(self.x))
        noise = Noise(self.attack.seed, settings.pop("rank"), settings.pop("step"))
        rowwise = self.view.rowwise and self.inner_step is None
        return self.attack.problem(self._attacked, self.x, self.y, noise, rowwise=rowwise, **settings)

    @property
    def _attacked(self) -> Callable[[Tensor], Any]:
        """What the attack differentiates: the logits, or a loss of the module's own."""
        return self.view if self.inner_step is None else self._inner_loss

    def _inner_loss(self, x: Tensor) -> Tensor:
        assert self.inner_step is not None
        with self.view.at(x) as batch, self.muter(self.module):
            loss = _loss_of(self.inner_step(batch))
        if loss is None:
            raise UsageError(
                "the step that the attack follows returned no loss: return a tensor, or attack the logits with "
                "attack_loss='ce'"
            )
        # attacks sum over the batch; a scalar is taken for a mean
        return loss * len(x) if loss.dim() == 0 else loss

    def _loss(self, inputs: Tensor) -> Tensor | None:
        return self._loss_and_logits(inputs)[0] if self.label_smoothing else self._ordinary_loss(inputs)

    def _ordinary_loss(self, inputs: Tensor) -> Tensor | None:
        # the first call of a step is the one that the user's logs and metrics see
        muted = self.muter(self.module) if self.outputs or self.guessed else nullcontext()
        with self.view.at(inputs) as replaced_batch, muted:
            self.outputs.append(self.next_step(replaced_batch))
        return _loss_of(self.outputs[-1])

    def _loss_and_logits(self, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
        with self.view.captured(inputs) as seen:
            value = self._ordinary_loss(inputs)
        # a step that augments, or calls another part, shows no logits of these inputs
        logits = seen[0] if seen else as_logits(self.view(inputs))
        if value is not None and self.label_smoothing:
            value = smoothed(value, logits, self.label_smoothing)
        return value, logits


def the_loss_itself(output: Tensor, y: Any) -> Tensor:
    """Return ``output``: the attack loss where the attacked function is a loss already."""
    return output


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _with_loss(output: Any, loss: Tensor | None) -> Any:
    """Return ``output``, what the user's step returned, with the objective's loss in the place of its own."""
    if loss is _loss_of(output):
        return output  # also what manual optimisation returns, which need not be a loss
    if loss is None:
        return None  # the objective skips the batch
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss
