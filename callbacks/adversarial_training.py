"""Adversarial training of an unmodified LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

from torch import Tensor

from robustdist._lightning import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from robustdist.attacks.base import Attack
from robustdist.attacks.losses import LossName
from robustdist.attacks.pgd import PGD
from robustdist.attacks.schedules import Schedule
from robustdist.callbacks.adversarial.combination import check_combination, check_compile, check_options
from robustdist.callbacks.adversarial.refusal import open_roll_call
from robustdist.callbacks.adversarial.rehearsal import rehearse, settle_fast_path
from robustdist.callbacks.adversarial.state import load_objective, objective_states
from robustdist.callbacks.adversarial.step import AttackCall, ObjectiveStep, the_loss_itself
from robustdist.callbacks.progress import Progress
from robustdist.core.batch import BatchAdapter
from robustdist.core.fast_path import AutoFlag, AutoPrecision, FastPath
from robustdist.core.forward import Forward
from robustdist.core.layout import channels_last_weights
from robustdist.core.muted import StepMuter
from robustdist.core.ranks import failing_together
from robustdist.core.redirect import StepInterceptor
from robustdist.core.roll_call import RollCall
from robustdist.core.space import Pixels, Space
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.objectives.base import Objective
from robustdist.objectives.pgd_at import PGDAT
from robustdist.types import AttackLoss

__all__ = ["AdversarialTraining"]


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
        attack_loss: Loss that the attack increases, in place of the attack's own: "ce", "margin", "dlr" or a function
            of (logits, target); or "training_step": the loss of the module's own step, run with logs and metrics muted
            in the attack's mode. With None a module that has a method ``attack_step(batch)`` is attacked by what that
            returns, a scalar (taken for a mean over the batch) or one value per sample. One of these is needed for
            targets that are not class indices.
        precision: Precision of the attack's forward passes: "inherit" from the trainer, "bf16" (autocast), "32", or
            "auto". Perturbation and projection are in float32 in any case. Under "true" half or double precision of
            the trainer only "inherit" makes sense.
        channels_last: Keep four-dimensional weights and inputs in channels-last order during fit. With "auto" only the
            attack may work in that order.
        eps_schedule: Factor on the radius over training, for example ``LinearRamp(share=0.3)``. It follows executed
            optimiser steps (one that a gradient scaler skips does not count) since this callback first took part; in
            manual optimisation, where Lightning does not know how often the module will step, it follows batches.
        step_size_schedule: The same for the step size; default ``eps_schedule``.
        order: Place among other step transforms; a lower one runs further outside.
        space: What is attacked: default :class:`~robustdist.attacks.Pixels`, the input tensor of the batch;
            :class:`~robustdist.attacks.Embeddings` for the output of an embedding layer, where the batch holds token
            ids and ``input_key`` is not used.
        label_smoothing: Share of the uniform distribution in the targets of the outer loss: (1 - share) times the
            module's loss plus share times the mean cross-entropy to all classes, which for cross-entropy is torch's
            ``label_smoothing``. The attack keeps to the hard labels.
        fold_batch_norm: Fold batch norm into convolutions during the attack, true, false or "auto".
        compile: Compile the forward pass of the attack with ``torch.compile``.

    The options "auto" measure on the first batch, on every process, and the choice of the first process is used and
    logged; it may differ on another machine. See :class:`~robustdist.core.fast_path.FastPath`.

    Attributes:
        fast_path: How the forward passes of the attack run, and what was measured.
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
        attack_loss: LossName | Literal["training_step"] | AttackLoss | None = None,
        precision: AutoPrecision = "inherit",
        channels_last: AutoFlag = False,
        eps_schedule: Schedule | None = None,
        step_size_schedule: Schedule | None = None,
        order: int = 0,
        space: Space | None = None,
        fold_batch_norm: AutoFlag = False,
        compile: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        part = forward if isinstance(forward, str) else ""
        self.fast_path = FastPath(precision, channels_last, fold_batch_norm, compile, part)
        if isinstance(objective, Attack):
            raise UsageError(f"objective={type(objective).__name__}(...) is an attack: pass it as attack=")
        for option, schedule in (("eps_schedule", eps_schedule), ("step_size_schedule", step_size_schedule)):
            if schedule is not None and not isinstance(schedule, Schedule):
                raise UsageError(f"{option}={schedule!r} is not a schedule: pass LinearRamp(share=0.3), for example")
        given = (("objective", objective, Objective), ("attack", attack, Attack), ("space", space, Space))
        for option, value, kind in given:
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{option}={value!r} is not an instance of robustdist's {kind.__name__}: create one")
        self.objective = objective if objective is not None else PGDAT()
        self.attack = attack if attack is not None else PGD()
        if attack_loss == "training_step":
            self.attack = self.attack.with_loss(the_loss_itself)
        elif attack_loss is not None:
            self.attack = self.attack.with_loss(attack_loss)
        check_options(self.objective, attack_loss, label_smoothing)
        check_compile(compile, forward, space)
        self.attack = self.objective.adapt(self.attack)
        if self.attack.targeted:
            raise UsageError("attack has targeted=True, but training has no target classes: use an untargeted attack")
        self.adapter = BatchAdapter(input_key, target_key)
        self.forward = forward
        self.attack_loss = attack_loss
        self.label_smoothing = label_smoothing
        self.space = space if space is not None else Pixels()
        self.precision = precision
        self.channels_last = channels_last
        self.eps_schedule = eps_schedule
        self.step_size_schedule = step_size_schedule if step_size_schedule is not None else eps_schedule
        self.order = order
        self.step_factor = 1.0
        self._muter = StepMuter()
        self._num_attacks = 0
        self._progress = Progress()
        self._rehearsed = False
        self._logs: dict[str, Tensor | float] = {}
        self._batch_size = 0
        self._replayed: Any = None
        self._trainer: Trainer | None = None
        self._layout: ExitStack | None = None
        self._roll_call: RollCall | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the combination and wrap the strategy's training step."""
        if stage != "fit":
            return
        with failing_together():
            check_combination(
                trainer, pl_module, self.objective, self.precision, self.attack_loss, self.label_smoothing
            )
        self.fast_path.forget()
        if self.channels_last is True:
            self._layout = ExitStack()
            self._layout.enter_context(channels_last_weights(pl_module))
        if trainer.global_step == 0:
            # a new training; a checkpoint is restored after this
            self._num_attacks = 0
            self._progress.reset()
            self.step_factor = 1.0
            self.objective.reset()
        self._progress.forget_length()
        self._trainer = trainer
        self._rehearsed = False
        StepInterceptor.of(trainer.strategy).add(self._training_step, self.order)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count executed optimiser steps."""
        trained = [module for module in pl_module.modules() if any(p.requires_grad for p in module.parameters(False))]
        if trained and not any(module.training for module in trained):
            rank_zero_warn(
                "all trainable modules are in eval mode at the start of fit: dropout and batch norm will not train; "
                "call train() on the model first",
                category=RobustDistWarning,
            )
        schedules = {"eps_schedule": self.eps_schedule, "step_size_schedule": self.step_size_schedule}
        followed = [option for option, schedule in schedules.items() if schedule is not None]
        if self.objective.follows_progress:
            followed.append(f"objective={type(self.objective).__name__}")
        followed_by = followed[0] if followed else None
        self._progress.start(trainer, pl_module, followed_by)
        self._roll_call = open_roll_call(trainer)
        if self.objective.replays > 1:
            rank_zero_info(
                f"{type(self.objective).__name__} makes {self.objective.replays} steps on every batch it takes and "
                f"drops the {self.objective.replays - 1} that follow: as many steps as one pass over the data has take "
                f"{self.objective.replays} epochs"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let go of the batch that was replayed when a new group begins, with every epoch at the latest."""
        # one batch later in every epoch: a loader with a fixed order would otherwise hand out the same few for ever
        if batch_idx == 0 or (batch_idx - trainer.current_epoch) % self.objective.replays == 0:
            self._replayed = None

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the objective undo what it did to the module for the sake of the graph."""
        self.objective.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the radius in use and what the objective reported."""
        for name, value in self._logs.items():
            key = name if "/" in name else f"robust/{name}"
            pl_module.log(key, value, on_step=True, batch_size=self._batch_size)
        self._logs = {}
        self._progress.end_batch(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the strategy and the module back as they were."""
        if stage == "fit":
            self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other processes, and give the strategy and the module back as they were."""
        if self._roll_call is not None and isinstance(exception, Exception):
            self._roll_call.tell(exception)
        self._release(trainer)

    def follow_pruning(self, recipe: Any) -> None:
        """Let the objective cut the weights it keeps, when :class:`StructuredPruning` has removed some."""
        self.objective.follow_pruning(recipe.slice_like)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the objective's memory; that of every process where they differ."""
        states = objective_states(self.objective)
        if states:
            checkpoint["callbacks"][self.state_key]["objective"] = states

    def state_dict(self) -> dict[str, Any]:
        """Return the counters behind random starts and schedules, and the step factor."""
        return {
            "num_attacks": self._num_attacks,
            **self._progress.state_dict(),
            "step_factor": self.step_factor,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counters; a checkpoint without a step factor has 1."""
        self._num_attacks = int(state_dict["num_attacks"])
        self._progress.load_state_dict(state_dict)
        self.step_factor = float(state_dict.get("step_factor", 1.0))
        if self._trainer is not None and "objective" in state_dict:
            load_objective(self.objective, state_dict["objective"], self._trainer)

    def scales(self) -> tuple[float, float]:
        """Return the factors on radius and step size at the present progress of training."""
        progress = self._progress.value
        eps_scale = self.eps_schedule(progress) if self.eps_schedule is not None else 1.0
        step_scale = self.step_size_schedule(progress) if self.step_size_schedule is not None else 1.0
        return eps_scale, step_scale * self.step_factor

    def _training_step(self, next_step: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert self._trainer is not None
        trainer = self._trainer
        self._num_attacks += 1
        if self.objective.replays > 1:
            batch = self._replayed = batch if self._replayed is None else self._replayed
        with nullcontext() if self._rehearsed else failing_together():
            step = self._step(trainer, lambda replaced: next_step(replaced, *args, **kwargs), batch)
            if not self._rehearsed:
                rehearse(step, self.objective)
        if not self._rehearsed and self.fast_path.needs_batch:
            settle_fast_path(trainer, step, self.objective)
        self._rehearsed = True
        with failing_together() if self.objective.refuses_by_batch else nullcontext():
            output, logs = step.run(self.objective)
        self._logs = {"eps": self.attack.eps * step.call.eps_scale, **logs}
        self._batch_size = len(step.x)
        return output

    def _step(self, trainer: Trainer, next_step: Callable[[Any], Any], batch: Any) -> ObjectiveStep:
        module = trainer.lightning_module
        eps_scale, step_scale = self.scales()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        grad_scale = None if scaler is None else float(scaler.get_scale())
        inner_step = self._inner_step(module, next_step)
        # replicas of one batch have to see the same attack
        rank = 0 if getattr(trainer.strategy, "replicated", False) else trainer.global_rank
        return ObjectiveStep(
            module=module,
            batch=batch,
            look=lambda batch: self.space.view(module, batch, self.adapter, self.forward),
            next_step=next_step,
            attack=self.attack if inner_step is None else self.attack.with_loss(the_loss_itself),
            call=AttackCall(rank, self._num_attacks, eps_scale, step_scale, grad_scale),
            fast_path=self.fast_path,
            muter=self._muter,
            inner_step=inner_step,
            label_smoothing=self.label_smoothing,
            channels_last=self.channels_last is True,
            progress=self._progress.value,
        )

    def _inner_step(self, module: LightningModule, next_step: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
        """Return the step whose loss the attack increases; None for a loss of the logits."""
        if self.attack_loss == "training_step":
            return next_step
        own = getattr(module, "attack_step", None)
        return own if self.attack_loss is None and not self.objective.attacks_predictions and callable(own) else None

    def _release(self, trainer: Trainer) -> None:
        StepInterceptor.of(trainer.strategy).remove(self._training_step)
        self.objective.after_backward()
        self._progress.stop()
        if self._roll_call is not None:
            self._roll_call.close()
            self._roll_call = None
        if self._layout is not None:
            self._layout.close()
            self._layout = None
        self.fast_path.close()
        self._muter = StepMuter()  # its stand-ins hold the user's metrics
        self._logs = {}
        self._replayed = None
        self._trainer = None
