"""Adversarial training of an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from robustdist._lightning import Callback, LightningModule, Trainer, check_same_package, rank_zero_warn
from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.pgd import PGD
from robustdist.attacks.schedules import Schedule
from robustdist.core.batch import BatchAdapter
from robustdist.core.forward import (
    AttackPrecision,
    Forward,
    as_logits,
    bind_forward,
    captured_logits,
    guarded_logits,
    looks_like_probabilities,
    precision_context,
)
from robustdist.core.layout import channels_last_weights
from robustdist.core.muted import StepMuter
from robustdist.core.ranks import failing_together
from robustdist.core.redirect import StepInterceptor, check_step_can_be_intercepted
from robustdist.core.rng import Noise
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.pgd_at import PGDAT
from robustdist.types import AttackLoss

__all__ = ["AdversarialTraining"]

# Share of images without a gradient to follow above which the user is told.
_NO_GRADIENT_SHARE = 0.1


class AdversarialTraining(Callback):
    """Trains the module on an adversarial objective; the module itself does not change.

    The user's ``training_step`` is called with a rebuilt batch, inside the strategy's forward and precision context.
    The attack runs on the module without its distributed wrapper, differentiates with respect to the input alone and
    leaves modes, buffers, gradients and random states as they were.

    Logged: ``robust/eps`` (radius in use) and what the objective reports, for example ``robust/clean_loss``.

    Args:
        objective: The outer loss; default :class:`~robustdist.objectives.PGDAT`.
        attack: The inner maximiser; default :class:`~robustdist.attacks.PGD` (linf, 8/255, 10 steps).
        input_key: Key, attribute or position of the input in the batch, when it cannot be told.
        target_key: Key, attribute or position of the target in the batch, when it cannot be told.
        forward: What maps inputs to logits: None for the module itself, the path of a sub-module, or a function
            (module, x, batch).
        attack_loss: Loss that the attack increases, in place of the attack's own: "ce", "margin" or a function of
            (logits, target); needed for targets that are not class indices.
        precision: Precision of the attack's forward passes: "inherit" from the trainer, "bf16" (autocast) or "32".
            Perturbation and projection are in float32 in any case. Under "true" half or double precision of the
            trainer only "inherit" makes sense.
        channels_last: Keep four-dimensional weights and inputs in channels-last order during fit.
        eps_schedule: Factor on the radius over training, for example ``LinearRamp(share=0.3)``. It follows executed
            optimiser steps (one that a gradient scaler skips does not count) since this callback first took part; in
            manual optimisation, where Lightning does not know how often the module will step, it follows batches.
        step_size_schedule: The same for the step size; default ``eps_schedule``.
        order: Place among other step transforms; a lower one runs further outside.

    Attributes:
        step_factor: Factor on the step size of the inner attack beside its schedule, 1.0 at the start of every training
            and kept in checkpoints; for guards that shrink the step.

    Raises:
        UsageError: At setup for sharded strategies, steps that fetch their own batch, and objectives that need a second
            pass under manual optimisation; before the first batch for batches, targets or images that do not fit.

    Example:
        >>> from robustdist.attacks import PGD, LinearRamp
        >>> AdversarialTraining(attack=PGD(eps=0.3, steps=7), eps_schedule=LinearRamp(0.3)).attack.eps
        0.3
    """

    def __init__(
        self,
        objective: Objective | None = None,
        attack: Attack | None = None,
        input_key: str | int | None = None,
        target_key: str | int | None = None,
        forward: Forward = None,
        attack_loss: Literal["ce", "margin"] | AttackLoss | None = None,
        precision: AttackPrecision = "inherit",
        channels_last: bool = False,
        eps_schedule: Schedule | None = None,
        step_size_schedule: Schedule | None = None,
        order: int = 0,
    ) -> None:
        if precision not in ("inherit", "bf16", "32"):
            raise UsageError(f"precision={precision!r} is unknown: choose inherit, bf16 or 32")
        if isinstance(objective, Attack):
            raise UsageError(f"objective={type(objective).__name__}(...) is an attack: pass it as attack=")
        for option, schedule in (("eps_schedule", eps_schedule), ("step_size_schedule", step_size_schedule)):
            if schedule is not None and not isinstance(schedule, Schedule):
                raise UsageError(f"{option}={schedule!r} is not a schedule: pass LinearRamp(share=0.3), for example")
        for option, value, kind in (("objective", objective, Objective), ("attack", attack, Attack)):
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{option}={value!r} is not an instance of robustdist's {kind.__name__}: create one")
        self.objective = objective if objective is not None else PGDAT()
        self.attack = attack if attack is not None else PGD()
        if attack_loss is not None:
            self.attack = self.attack.with_loss(attack_loss)
        self.attack = self.objective.adapt(self.attack)
        if self.attack.targeted:
            raise UsageError("attack has targeted=True, but training has no target classes: use an untargeted attack")
        self.adapter = BatchAdapter(input_key, target_key)
        self.forward = forward
        self.precision: AttackPrecision = precision
        self.channels_last = channels_last
        self.eps_schedule = eps_schedule
        self.step_size_schedule = step_size_schedule if step_size_schedule is not None else eps_schedule
        self.order = order
        self.step_factor = 1.0
        self._muter = StepMuter()
        self._num_attacks = 0
        self._num_steps = 0
        # None while the length of training is unknown, as in a learning rate finder: schedules are at their end then
        self._num_total_steps: float | None = None
        self._checked = False
        self._logs: dict[str, Tensor | float] = {}
        self._batch_size = 0
        self._trainer: Trainer | None = None
        self._step_counter: RemovableHandle | None = None
        self._layout: ExitStack | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the combination and wrap the strategy's training step."""
        if stage != "fit":
            return
        with failing_together():
            self._check_combination(trainer, pl_module)
        if self.channels_last:
            self._layout = ExitStack()
            self._layout.enter_context(channels_last_weights(pl_module))
        if trainer.global_step == 0:
            # a new training; a checkpoint is restored after this
            self._num_attacks = self._num_steps = 0
            self.step_factor = 1.0
        self._num_total_steps = None
        self._trainer = trainer
        self._checked = False
        StepInterceptor.of(trainer.strategy).add(self._training_step, self.order)

    def _check_combination(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_same_package(pl_module)
        check_step_can_be_intercepted(
            trainer.strategy,
            pl_module,
            needs_second_pass=self.objective.needs_second_pass,
            option=f"AdversarialTraining(objective={type(self.objective).__name__})",
        )
        if self.precision != "inherit" and trainer.precision not in ("32-true", "bf16-mixed", "16-mixed"):
            raise UsageError(
                f"precision={self.precision!r} of the attack does not go with precision={trainer.precision!r} of the "
                "Trainer, whose weights have that type: use precision='inherit'"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count executed optimiser steps."""
        trained = [module for module in pl_module.modules() if any(p.requires_grad for p in module.parameters(False))]
        if trained and not any(module.training for module in trained):
            rank_zero_warn(
                "all trainable modules are in eval mode at the start of fit: dropout and batch norm will not train; "
                "call train() on the model first",
                category=RobustDistWarning,
            )
        if self.eps_schedule is not None or self.step_size_schedule is not None:
            self._num_total_steps = self._length_of_training(trainer, pl_module)
        # a post hook runs only when the optimiser really stepped; global_step also counts steps a scaler skipped
        if trainer.optimizers and pl_module.automatic_optimization:
            self._step_counter = trainer.optimizers[0].register_step_post_hook(self._count_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Try the attack on the first batch, so that what does not fit is said before anything is trained."""
        if self._checked:
            return
        self._checked = True
        with failing_together():
            self._check(trainer, pl_module, batch)

    def _check(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        x, y, *_ = self.adapter.locate(batch)
        forward = bind_forward(pl_module, self.forward, batch)
        with trainer.precision_plugin.train_step_context(), precision_context(self.precision, x.device):
            logits = guarded_logits(pl_module, forward, x, self.attack.model_mode)
            targets = logits if self.objective.attacks_predictions else y
            result = self.attack.run(pl_module, x, targets, forward=forward, rank=trainer.global_rank)
        share = result.no_gradient.float().mean().item() if len(x) else 0.0
        if looks_like_probabilities(logits):
            rank_zero_warn(
                "the model returns probabilities, not logits, whose gradient vanishes where the model is sure "
                f"({share:.0%} of these images now): leave softmax to the loss, or name the part that returns logits "
                "with the option forward",
                category=RobustDistWarning,
            )
        elif share > _NO_GRADIENT_SHARE:
            rank_zero_warn(
                f"{share:.0%} of the first images have no input gradient to follow: the attack is blind there "
                "(huge logits or a part without gradient); try attack_loss='margin'",
                category=RobustDistWarning,
            )

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the objective undo what it did to the module for the sake of the graph."""
        self.objective.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the radius in use and what the objective reported."""
        for name, value in self._logs.items():
            pl_module.log(f"robust/{name}", value, on_step=True, batch_size=self._batch_size)
        self._logs = {}
        if not pl_module.automatic_optimization:
            self._num_steps += 1

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the strategy and the module back as they were."""
        if stage == "fit":
            self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the strategy and the module back as they were."""
        self._release(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters behind random starts and schedules, and the step factor."""
        return {"num_attacks": self._num_attacks, "num_steps": self._num_steps, "step_factor": self.step_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counters; a checkpoint without a step factor has 1."""
        self._num_attacks = int(state_dict["num_attacks"])
        self._num_steps = int(state_dict["num_steps"])
        self.step_factor = float(state_dict.get("step_factor", 1.0))

    def scales(self) -> tuple[float, float]:
        """Return the factors on radius and step size at the present progress of training."""
        # counted from 1: a ramp that starts at zero shall not waste the first step on a radius of zero
        progress = 1.0 if self._num_total_steps is None else min(1.0, (self._num_steps + 1) / self._num_total_steps)
        eps_scale = self.eps_schedule(progress) if self.eps_schedule is not None else 1.0
        step_scale = self.step_size_schedule(progress) if self.step_size_schedule is not None else 1.0
        return eps_scale, step_scale * self.step_factor

    def _length_of_training(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """Return the optimiser steps, or in manual optimisation the batches, that this callback will have counted."""
        if pl_module.automatic_optimization:
            total, done = trainer.estimated_stepping_batches, trainer.global_step
        else:
            epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
            total, done = trainer.num_training_batches * epochs, trainer.fit_loop.total_batch_idx + 1
        # -1 is Lightning's answer for max_epochs with a loader that has no length
        if not 0 < total < float("inf"):
            raise UsageError(
                "eps_schedule needs the length of training: set the Trainer's max_epochs with a loader that has a "
                "length, or in automatic optimisation its max_steps"
            )
        return max(1.0, total - done + self._num_steps)

    def _training_step(self, next_step: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert self._trainer is not None
        trainer, module = self._trainer, self._trainer.lightning_module
        x, y, *_ = self.adapter.locate(batch)
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        self._num_attacks += 1
        outputs: list[Any] = []

        def loss(inputs: Tensor) -> Tensor | None:
            replaced = self.adapter.replace(batch, inputs)
            # the first call of a step is the one that the user's logs and metrics see
            with self._muter(module) if outputs else nullcontext():
                outputs.append(next_step(replaced, *args, **kwargs))
            return _loss_of(outputs[-1])

        forward = bind_forward(module, self.forward, batch)

        def loss_and_logits(inputs: Tensor) -> tuple[Tensor | None, Tensor]:
            with captured_logits(module, self.forward, inputs) as seen:
                value = loss(inputs)
            # a step that augments, or calls another part, shows no logits of these inputs
            return value, seen[0] if seen else as_logits(forward(inputs))

        def problem() -> Problem:
            settings = self._call_settings(trainer, len(x))
            noise = Noise(self.attack.seed, settings.pop("rank"), settings.pop("step"))
            return self.attack.problem(forward, x, y, noise, **settings)

        context = ObjectiveContext(
            x=x,
            y=y,
            attack=lambda x, y: self._perturb(trainer, module, forward, x, y),
            loss=loss,
            logits=lambda inputs: as_logits(forward(inputs)),
            loss_and_logits=loss_and_logits,
            reference=lambda inputs: guarded_logits(module, forward, inputs, self.attack.model_mode),
            problem=problem,
            from_pixels=lambda pixels: self.attack.from_pixels(pixels, x),
            named_parameters=module.named_parameters,
            step_factor=self.step_factor,
        )
        total = self.objective.compute(context)
        self._logs.update(context.logs)
        self._batch_size = len(x)
        return _with_loss(outputs[0], total) if outputs else total

    def _perturb(
        self, trainer: Trainer, module: LightningModule, forward: Callable[[Tensor], Any], x: Tensor, y: Any
    ) -> Tensor:
        settings = self._call_settings(trainer, len(x))
        with precision_context(self.precision, x.device):
            return self.attack(module, x, y, forward=forward, **settings)

    def _call_settings(self, trainer: Trainer, batch_size: int) -> dict[str, Any]:
        eps_scale, step_scale = self.scales()
        self._logs["eps"] = self.attack.eps * eps_scale
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "rank": trainer.global_rank,
            "step": self._num_attacks,
            "eps_scale": eps_scale,
            "step_scale": step_scale,
            # the scale keeps the gradient of a mean over the batch in range, the attack sums
            "loss_scale": float(scaler.get_scale()) / max(1, batch_size) if scaler is not None else 1.0,
        }

    def _count_step(self, optimizer: Any, *_: Any) -> None:
        # fused optimisers are called in any case and skip the update themselves
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self._num_steps += 1

    def _release(self, trainer: Trainer) -> None:
        StepInterceptor.of(trainer.strategy).remove(self._training_step)
        self.objective.after_backward()
        if self._step_counter is not None:
            self._step_counter.remove()
            self._step_counter = None
        if self._layout is not None:
            self._layout.close()
            self._layout = None
        self._muter = StepMuter()  # its stand-ins hold the user's metrics
        self._logs = {}
        self._trainer = None


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
