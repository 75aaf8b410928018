"""Notices when training on a cheap attack stops to help against a strong one."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from robustdist._lightning import (
    Callback,
    LightningModule,
    Trainer,
    WeightAveraging,
    rank_zero_warn,
)
from robustdist.attacks.base import Attack
from robustdist.attacks.fgsm import FGSM
from robustdist.attacks.losses import check_class_indices
from robustdist.attacks.pgd import PGD
from robustdist.callbacks.adversarial_training import AdversarialTraining
from robustdist.core.collapse import CollapseRule, has_collapsed
from robustdist.core.forward import bind_forward, guarded_logits
from robustdist.core.ranks import failing_together, gathered
from robustdist.core.snapshot import on_cpu, restore_snapshot, take_snapshot
from robustdist.core.space import Pixels
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.types import UNLABELED, check_count

__all__ = ["CatastrophicOverfittingGuard"]

_BATCH_SIZE = 128


class CatastrophicOverfittingGuard(Callback):
    """Watches the accuracy under several attack steps on a fixed subset of the training data; acts when it collapses.

    Training on single-step attacks can fail within an epoch: the accuracy under the training attack rises on while
    that under several steps falls to nothing. The subset is the first ``num_samples`` training samples that this
    callback sees, over all processes together and as the loader hands them out, kept on the CPU; those without label
    (target -1) are left out. The weights are those
    that are trained, not their running average. Training is not disturbed: without a rollback the weights are the
    same, bit for bit, as without the guard.

    Logged at every check: ``guard/multi_step_acc``, at the full radius of the training attack whatever an
    ``eps_schedule`` has reached, so that any two checks compare and a monitor can follow it; ``guard/one_step_acc``, at
    the radius in use, under the training attack where it takes one step, otherwise under one step of that length; and
    ``guard/ratio``, the share of it that several steps at the same radius leave. A collapse is a fall of the first, or
    of the last, to less than ``1 - drop`` of its best so far (:class:`~robustdist.core.collapse.CollapseRule`).

    A rollback brings back parameters, buffers and optimiser states of the last check without a collapse, and the
    averages of Lightning's ``WeightAveraging``, on every process, and multiplies the step of the training attack by
    ``step_shrink``. Time does not go back: learning rates, schedules, data and counters go on. The copies are kept in
    memory on the CPU and in checkpoints, which grow by the size of weights and optimiser states (about double); the
    subset is stored too. With "warn" there is no copy of the weights.

    Args:
        attack: The multi-step attack; default PGD with 10 steps and the margin loss, whose gradient does not vanish for
            confident nets, in the norm, radius and units of the training attack.
        num_samples: Size of the subset.
        every_n_epochs: Check after every n-th epoch.
        every_n_steps: Check after every n-th optimiser step instead, as soon as the subset is complete.
        drop: Share that must be lost to count as a collapse, in (0, 1).
        fall: Accuracy that must be lost besides, in [0, 1), against noise.
        action: "warn"; "rollback" to the last good weights, with a warning; or "stop" training there.
        step_shrink: Factor on the step of the training attack at each rollback, in (0, 1].
        max_rollbacks: After so many rollbacks only warn.

    Raises:
        UsageError: If an argument is out of range; at the start of fit without exactly one
            :class:`~robustdist.callbacks.AdversarialTraining`; before the first step for targets that are not classes.

    References:
        Wong et al., "Fast is better than free: Revisiting adversarial training" (stops when the accuracy under PGD
        falls by more than 0.2). Andriushchenko and Flammarion, "Understanding and Improving Fast Adversarial Training".

    Example:
        >>> guard = CatastrophicOverfittingGuard(action="rollback")
        >>> guard.drop, guard.history
        (0.5, [])
    """

    def __init__(
        self,
        attack: Attack | None = None,
        num_samples: int = 256,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        drop: float = 0.5,
        fall: float = 0.1,
        action: Literal["warn", "rollback", "stop"] = "warn",
        step_shrink: float = 0.75,
        max_rollbacks: int = 3,
    ) -> None:
        if attack is not None and not isinstance(attack, Attack):
            raise UsageError(f"attack={attack!r} is not an attack of robustdist.attacks: create one")
        if attack is not None and attack.targeted:
            raise UsageError("attack has targeted=True, but the guard counts right classes: use an untargeted attack")
        check_count(num_samples, "num_samples")
        check_count(every_n_epochs, "every_n_epochs")
        if every_n_steps is not None:
            check_count(every_n_steps, "every_n_steps")
        if not 0 < drop < 1:
            raise UsageError(f"drop={drop} must lie between 0 and 1: it is the share of the best accuracy that is lost")
        if not 0 <= fall < 1:
            raise UsageError(f"fall={fall} must be in [0, 1): it is an accuracy")
        if action not in ("warn", "rollback", "stop"):
            raise UsageError(f"action={action!r} is unknown: choose warn, rollback or stop")
        if not 0 < step_shrink <= 1:
            raise UsageError(f"step_shrink={step_shrink} must be in (0, 1]: it multiplies the step of the attack")
        if max_rollbacks < 0:
            raise UsageError(f"max_rollbacks={max_rollbacks} must not be negative")
        self.attack = attack
        self.num_samples = num_samples
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.drop = drop
        self.fall = fall
        self.action = action
        self.step_shrink = step_shrink
        self.max_rollbacks = max_rollbacks
        self._reset()

    def _reset(self) -> None:
        #: One entry per check: "epoch" (from 1), "step", "multi_step_acc", "one_step_acc", "ratio", "collapsed".
        self.history: list[dict[str, Any]] = []
        self.num_rollbacks = 0
        self._rule = CollapseRule(self.drop, self.fall)
        self._collapsed = False
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._samples: tuple[Tensor, Tensor] | None = None
        self._snapshot: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the training attack."""
        if stage != "fit":
            return
        with failing_together():
            self._training = self._find_training(trainer)
        if trainer.global_step == 0:
            # a new training; a checkpoint is restored after this
            self._reset()

    def _find_training(self, trainer: Trainer) -> AdversarialTraining:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        found = [callback for callback in callbacks if isinstance(callback, AdversarialTraining)]
        if len(found) != 1:
            raise UsageError(
                f"CatastrophicOverfittingGuard watches one AdversarialTraining, but the Trainer has {len(found)}: "
                "give it exactly one"
            )
        if callable(found[0].forward):
            raise UsageError(
                "CatastrophicOverfittingGuard keeps images and labels, not whole batches, but forward is a function of "
                "the batch: name a sub-module with forward='...' in AdversarialTraining"
            )
        if not isinstance(found[0].space, Pixels):
            raise UsageError(
                f"CatastrophicOverfittingGuard keeps input tensors, but space={type(found[0].space).__name__} of "
                "AdversarialTraining attacks something else: leave the guard out"
            )
        return found[0]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to watch the steps, from where a resumed training goes on."""
        self._last_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the first samples."""
        missing = math.ceil(self.num_samples / trainer.world_size) - sum(len(x) for x, _ in self._batches)
        if self._samples is not None or missing <= 0:
            return
        x, y, *_ = self._training.adapter.locate(batch)
        rows = _labeled(y, len(x))
        if not self._batches:
            with failing_together():
                forward = bind_forward(pl_module, self._training.forward, batch)
                self._multi_step().check_inputs(x)
                logits = guarded_logits(pl_module, forward, x)
                check_class_indices(logits[rows], y[rows], remedy="the guard counts right classes, leave it out")
        rows = rows[:missing]
        self._batches.append((on_cpu(x[rows]), on_cpu(y[rows])))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check, if it is time."""
        step, before = trainer.global_step, self._last_step
        self._last_step = step
        if self.every_n_steps is not None:
            # several optimisers move the counter by more than one per batch
            due = step // self.every_n_steps > before // self.every_n_steps
        else:
            due = trainer.is_last_batch and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if due and self._have_samples(trainer):
            self._check(trainer, pl_module)

    def _have_samples(self, trainer: Trainer) -> bool:
        if self._samples is None:
            # every process keeps all of them, so that a checkpoint of the first one is enough to go on
            batches = [pair for batches in gathered(self._batches) for pair in batches]
            found = sum(len(x) for x, _ in batches)
            if found == 0 or (found < self.num_samples and not trainer.is_last_batch):
                return False
            self._samples = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
            self._batches = []
        return True

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        full, multi_step, one_step = self._measure(trainer, pl_module)
        ratio = min(1.0, multi_step / one_step) if one_step else 1.0
        values = {"multi_step_acc": full, "one_step_acc": one_step, "ratio": ratio}
        self._log(trainer, pl_module, values)
        collapsed = self._rule.judge(full, multi_step, one_step)
        entry = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step, **values, "collapsed": collapsed}
        self.history.append(entry)
        if not collapsed:
            self._collapsed = False
            if self.action != "warn":
                self._snapshot = self._take(trainer, pl_module)
        elif self.action == "warn" or self._snapshot is None:
            # once per collapse
            if not self._collapsed:
                self._warn(entry, "")
            self._collapsed = True
        elif self.action == "stop":
            self._warn(entry, "Training stops with the weights of the last good check")
            self._restore(trainer, pl_module)
            trainer.should_stop = True
        else:
            self._roll_back(trainer, pl_module, entry)

    def _roll_back(self, trainer: Trainer, pl_module: LightningModule, entry: dict[str, Any]) -> None:
        if self.num_rollbacks >= self.max_rollbacks:
            if not self._collapsed:
                self._warn(entry, f"All max_rollbacks={self.max_rollbacks} rollbacks are used up")
            self._collapsed = True
            return
        assert self._snapshot is not None
        self._restore(trainer, pl_module)
        self._training.step_factor *= self.step_shrink
        self.num_rollbacks += 1
        self._warn(
            entry,
            f"Rolled back to the weights of step {self._snapshot['step']} ({self.num_rollbacks} of "
            f"{self.max_rollbacks} times), the step of the training attack is now {self._training.step_factor:.3g} "
            "times the configured one",
        )

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> tuple[float, float, float]:
        """Return the accuracy under several steps at the full radius, and under several and one at that in use."""
        assert self._samples is not None
        eps_scale, step_scale = self._training.scales()
        one_step = self._one_step()
        # what a schedule or a rollback made of the step of the training attack is about no other attack
        one_step_scale = step_scale if one_step is self._training.attack else eps_scale
        runs: list[tuple[Attack, dict[str, float]]] = [
            (self._multi_step(), {}),
            (self._multi_step(), {"eps_scale": eps_scale, "step_scale": eps_scale}),
            (one_step, {"eps_scale": eps_scale, "step_scale": one_step_scale}),
        ]
        if eps_scale == 1.0:
            del runs[1]
        num_samples = len(self._samples[0])
        counts = torch.zeros(len(runs), device=pl_module.device)
        rows = list(range(trainer.global_rank, num_samples, trainer.world_size))
        forward = bind_forward(pl_module, self._training.forward, None)
        for start in range(0, len(rows), _BATCH_SIZE):
            ids = rows[start : start + _BATCH_SIZE]
            x, y = (part[ids].to(pl_module.device) for part in self._samples)
            for place, (attack, scales) in enumerate(runs):
                with (
                    trainer.precision_plugin.val_step_context(),
                    torch.autocast(pl_module.device.type, enabled=False),
                ):
                    x_adv = attack(pl_module, x, y, forward=forward, sample_ids=ids, **scales)
                    predicted = guarded_logits(pl_module, forward, x_adv).argmax(1)
                counts[place] += (predicted == y).sum()
        full, *others = (torch.as_tensor(trainer.strategy.reduce(counts, reduce_op="sum")) / num_samples).tolist()
        return full, (others[0] if len(others) == 2 else full), others[-1]

    def _multi_step(self) -> Attack:
        if self.attack is not None:
            return self.attack
        return PGD(steps=10, attack_loss="margin", **self._threat_model())

    def _one_step(self) -> Attack:
        training = self._training.attack
        by_classes = not self._training.objective.attacks_predictions
        if by_classes and getattr(training, "steps", 1) == 1:
            return training
        return FGSM(**self._threat_model())

    def _threat_model(self) -> dict[str, Any]:
        names = ("norm", "eps", "bounds", "mean", "std", "seed")
        return {name: getattr(self._training.attack, name) for name in names}

    def _take(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        snapshot = take_snapshot(pl_module, trainer.optimizers)
        snapshot["step"] = trainer.global_step
        # the hooks with which these callbacks fill a checkpoint; the weights themselves are in the snapshot already
        averages: list[dict[str, Any]] = []
        for callback in _weight_averages(trainer):
            checkpoint: dict[str, Any] = {"state_dict": pl_module.state_dict()}
            callback.on_save_checkpoint(trainer, pl_module, checkpoint)
            del checkpoint["current_model_state"]
            averages.append(on_cpu(checkpoint))
        snapshot["averages"] = averages
        return snapshot

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._snapshot is not None
        restore_snapshot(self._snapshot, pl_module, trainer.optimizers)
        for callback, checkpoint in zip(_weight_averages(trainer), self._snapshot["averages"], strict=True):
            callback.on_load_checkpoint(
                trainer, pl_module, {**checkpoint, "current_model_state": pl_module.state_dict()}
            )

    def _log(self, trainer: Trainer, pl_module: LightningModule, values: dict[str, float]) -> None:
        by_steps = self.every_n_steps is not None
        for name, value in values.items():
            # equal on all ranks already; sync_dist only keeps Lightning from warning
            pl_module.log(
                f"guard/{name}",
                torch.tensor(value, device=pl_module.device),
                on_step=by_steps,
                on_epoch=not by_steps,
                sync_dist=True,
                batch_size=1,
            )
            # for monitors that look before the epoch is over
            trainer.callback_metrics[f"guard/{name}"] = torch.tensor(value)

    def _warn(self, entry: dict[str, Any], done: str) -> None:
        one_step, best_one_step = entry["one_step_acc"], max(past["one_step_acc"] for past in self.history)
        if has_collapsed(one_step, best_one_step, drop=self.drop, fall=self.fall):
            what = "training has collapsed"
            remedy = "a lower learning rate, gradient clipping, or LinearRamp as eps_schedule"
        else:
            what = "catastrophic overfitting"
            remedy = "a shorter step, more attack steps (PGD(steps=2)), NFGSM, GradAlign, or a smaller eps"
        weights = done or "Train from a checkpoint that monitors guard/multi_step_acc, or set action='rollback'"
        rank_zero_warn(
            f"{what} in epoch {entry['epoch']} (step {entry['step']}): under several attack steps accuracy is "
            f"{entry['multi_step_acc']:.1%} after {self._rule.best:.1%} at best, under one step it is {one_step:.1%}, "
            f"of which several at that radius leave {entry['ratio']:.0%} after {self._rule.best_ratio:.0%} at best. "
            f"{weights}. What helps: {remedy}",
            category=RobustDistWarning,
        )

    def follow_pruning(self, recipe: Any) -> None:
        """Drop the snapshot, whose shapes the module no longer has; the next healthy check makes one."""
        self._snapshot = None

    def state_dict(self) -> dict[str, Any]:
        """Return history, subset and the last good weights: tensors and plain types."""
        return {
            "history": [dict(entry) for entry in self.history],
            "num_rollbacks": self.num_rollbacks,
            "best": self._rule.best,
            "best_ratio": self._rule.best_ratio,
            "collapsed": self._collapsed,
            "samples": None if self._samples is None else list(self._samples),
            "snapshot": self._snapshot,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the same subset and the same last good weights."""
        self.history = [dict(entry) for entry in state_dict["history"]]
        self.num_rollbacks = int(state_dict["num_rollbacks"])
        self._rule = CollapseRule(self.drop, self.fall, float(state_dict["best"]), float(state_dict["best_ratio"]))
        self._collapsed = bool(state_dict["collapsed"])
        samples = state_dict["samples"]
        self._samples = None if samples is None else (on_cpu(samples[0]), on_cpu(samples[1]))
        self._snapshot = on_cpu(state_dict["snapshot"])


def _labeled(y: Any, size: int) -> Tensor:
    """Return the numbers of the samples that have a label; all of them where targets are no class indices."""
    if isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point():
        return (y != UNLABELED).nonzero()[:, 0]
    return torch.arange(size)


def _weight_averages(trainer: Trainer) -> list[WeightAveraging]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, WeightAveraging)]
