"""One training step of the user's module, as an objective sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from robustdist._lightning import LightningModule
from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.core.fast_path import FastPath
from robustdist.core.forward import as_logits, guarded_logits
from robustdist.core.muted import StepMuter
from robustdist.core.rng import Noise
from robustdist.core.space import View
from robustdist.objectives.base import Objective, ObjectiveContext

__all__ = ["AttackCall", "ObjectiveStep"]


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
        view: The user's batch, which never changes, as a point of the attacked space.
        next_step: Runs the user's ``training_step`` on another batch.
        attack: The inner maximiser.
        call: Its settings in this step.
        fast_path: How the forward passes of the attack run.
        muter: Silences all runs of the step but the first.
        x: Inputs, where they are not those of the batch as it is (another memory format).
    """

    module: LightningModule
    view: View
    next_step: Callable[[Any], Any]
    attack: Attack
    call: AttackCall
    fast_path: FastPath
    muter: StepMuter
    x: Tensor
    step_factor: float = 1.0
    progress: float = 1.0
    outputs: list[Any] = field(default_factory=list)

    @property
    def y(self) -> Any:
        """The targets."""
        return self.view.y

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
            attack=lambda x, y: self.run_attack(x, y).x_adv,
            loss=self._loss,
            logits=lambda inputs: as_logits(self.view(inputs)),
            loss_and_logits=self._loss_and_logits,
            reference=self.reference,
            problem=self._problem,
            from_pixels=lambda pixels: self.attack.from_pixels(pixels, self.x),
            module=self.module,
            step_factor=self.step_factor,
            progress=self.progress,
        )

    def run_attack(self, x: Tensor, y: Any) -> AttackResult:
        """Attack inputs of this batch."""
        with self.fast_path.applied(self.module, self.attack.model_mode):
            settings = self.call.settings(len(x))
            return self.attack.run(self.module, x, y, forward=self.view, rowwise=self.view.rowwise, **settings)

    def reference(self, x: Tensor) -> Tensor:
        """Return logits without a graph, from the module as the attack sees it."""
        return guarded_logits(self.module, self.view, x, self.attack.model_mode)

    def _problem(self) -> Problem:
        settings = self.call.settings(len(self.x))
        noise = Noise(self.attack.seed, settings.pop("rank"), settings.pop("step"))
        return self.attack.problem(self.view, self.x, self.y, noise, rowwise=self.view.rowwise, **settings)

    def _loss(self, inputs: Tensor) -> Tensor | None:
        # the first call of a step is the one that the user's logs and metrics see
        with self.view.at(inputs) as replaced, self.muter(self.module) if self.outputs else nullcontext():
            self.outputs.append(self.next_step(replaced))
        return _loss_of(self.outputs[-1])

    def _loss_and_logits(self, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
        with self.view.captured(inputs) as seen:
            value = self._loss(inputs)
        # a step that augments, or calls another part, shows no logits of these inputs
        return value, seen[0] if seen else as_logits(self.view(inputs))


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
