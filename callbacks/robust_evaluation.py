"""Robust accuracy in validation and test."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from robustdist._lightning import Callback, LightningModule, Trainer, rank_zero_debug, rank_zero_warn
from robustdist.attacks.base import Attack
from robustdist.attacks.pgd import PGD
from robustdist.callbacks.evaluation.report import ReportContext, accuracies, log_accuracies, publish
from robustdist.callbacks.evaluation.session import EvaluationSession, SessionOptions
from robustdist.callbacks.evaluation.setup import (
    attack_context,
    check_attacks,
    check_combination,
    check_report_dir,
    warn_about_averages,
    warn_about_patience,
)
from robustdist.core.batch import BatchAdapter
from robustdist.core.forward import Forward
from robustdist.core.ranks import failing_together
from robustdist.core.sharding import flatten_loaders, shard_of
from robustdist.core.space import Pixels, Space
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.evaluation.tally import RobustTally
from robustdist.report import EvaluationResult, Examples
from robustdist.report.leaderboard import checked_row

__all__ = ["RobustEvaluation"]


class RobustEvaluation(Callback):
    """Measures clean and robust accuracy in fit-validation, ``validate`` and ``test``.

    An image counts as robust when it is classified correctly without attack and under every attack. Each image is
    counted once, whatever the number of processes, and attacked from a random start that depends on (seed, image), so
    neither the batch size, the number of processes nor the order of the attacks changes the result of robustdist's own
    attacks. Models are attacked in eval mode and in the precision of their weights, without autocast.

    Logged, for monitors: ``robust/clean_acc``, ``robust/<name>_acc`` per attack, ``robust/acc`` (worst case per image
    over all attacks) and ``robust/acc_low`` and ``robust/acc_high`` (95 % Wilson interval of ``robust/acc``).
    Epochs without an evaluation repeat the last values for monitors, but not in the loggers: an EarlyStopping must
    have more patience than ``every_n_epochs``. Several loaders of one stage are counted together;
    ``robust/loader<n>_acc`` is then the worst case over all attacks per loader, ``robust/worst_loader_acc`` the
    smallest of them. A second evaluation in the same Trainer needs a ``prefix`` of its own.

    Args:
        attacks: Attacks by name; default ``{"pgd20": PGD(steps=20)}`` (linf, 8/255). They should share norm and radius
            to be one threat model; otherwise the report calls it "mixed".
        every_n_epochs: In fit, evaluate the first epoch, every n-th after it and the last of ``max_epochs``.
        max_samples: Evaluate only the first samples of each data set; None for all.
        report_dir: Folder for ``report.json``, ``report.html`` and pictures, written at the end of ``fit``,
            ``validate`` and ``test``; None for no report.
        input_key: As in :class:`~robustdist.callbacks.AdversarialTraining`.
        target_key: As in :class:`~robustdist.callbacks.AdversarialTraining`.
        forward: As in :class:`~robustdist.callbacks.AdversarialTraining`.
        num_examples: Images shown in the report.
        prefix: First part of the log keys.
        space: As in :class:`~robustdist.callbacks.AdversarialTraining`.
        thorough: In ``validate`` and ``test``, examine the evaluation with attacks of its own (see docs/evaluation.md).
        check_samples: Images that it is examined on.
        surrogate: For the transfer check, a module that maps inputs to logits; default a small net that learns the
            model's answers.
        resume: In ``validate`` and ``test``, go on where a killed evaluation with the same weights, attacks and images
            stopped; needs ``report_dir``.
        save_examples: In ``validate`` and ``test``, save adversarial examples in ``report_dir`` and measure them again.
        leaderboard: Fields of the leaderboard row that only you know: "name", "authors", "link", "venue", ...

    Raises:
        UsageError: If the attacks are not usable here, or a batch does not fit them; at setup for two evaluations with
            one prefix.

    Example:
        >>> from robustdist.attacks import PGD
        >>> callback = RobustEvaluation(attacks={"pgd20": PGD(eps=0.3, steps=20)}, max_samples=500)
    """

    def __init__(
        self,
        attacks: dict[str, Attack] | None = None,
        every_n_epochs: int = 1,
        max_samples: int | None = None,
        report_dir: str | None = None,
        input_key: str | int | None = None,
        target_key: str | int | None = None,
        forward: Forward = None,
        num_examples: int = 6,
        prefix: str = "robust",
        space: Space | None = None,
        thorough: bool = False,
        check_samples: int = 200,
        surrogate: torch.nn.Module | None = None,
        resume: bool = False,
        save_examples: bool = False,
        leaderboard: dict[str, Any] | None = None,
    ) -> None:
        check_attacks(attacks)
        check_report_dir(report_dir, resume=resume, save_examples=save_examples)
        if space is not None and not isinstance(space, Space):
            raise UsageError(f"space={space!r} is not an instance of robustdist's Space: create one")
        if save_examples and space is not None and not space.has_pictures:
            raise UsageError("save_examples saves images, and this space has none: leave it out")
        counts = {"every_n_epochs": every_n_epochs, "max_samples": max_samples, "check_samples": check_samples}
        for option, value in counts.items():
            if value is not None and value < 1:
                raise UsageError(f"{option}={value} must be at least 1")
        self.attacks: dict[str, Attack] = dict(attacks) if attacks is not None else {"pgd20": PGD(steps=20)}
        self.every_n_epochs = every_n_epochs
        self.max_samples = max_samples
        self.report_dir = report_dir
        self.adapter = BatchAdapter(input_key, target_key)
        self.forward = forward
        self.num_examples = num_examples
        self.prefix = prefix
        self.space = space if space is not None else Pixels()
        #: Result of the last finished evaluation.
        self.result: EvaluationResult | None = None
        #: Images of the last finished evaluation (rank zero).
        self.examples: Examples | None = None
        #: One entry per evaluated epoch of fit: "epoch", "clean_acc", "acc", "<name>_acc".
        self.history: list[dict[str, float]] = []
        #: What the report shows beside the result.
        self.context = ReportContext(leaderboard=checked_row(leaderboard or {}))
        self.thorough = thorough
        self.check_samples = check_samples
        self.surrogate = surrogate
        self.resume = resume
        self.save_examples = save_examples
        self._session: EvaluationSession | None = None
        self._finished: EvaluationSession | None = None
        self._everywhere = False
        self._warned: set[str] = set()
        self._switched_loop: Any = None
        self._averages: dict[str, Any] | None = None
        self._logged: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        """Two evaluations may stand side by side."""
        return self._generate_state_key(attacks=sorted(self.attacks), prefix=self.prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return the history behind the curves and the values that monitors see until the next evaluation."""
        return {"history": [dict(entry) for entry in self.history], "logged": dict(self._logged)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history."""
        self.history = [dict(entry) for entry in state_dict["history"]]
        self._logged = dict(state_dict["logged"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the combination and make gradients possible in the evaluation loop."""
        if stage == "predict":
            return
        with failing_together():
            check_combination(trainer, pl_module, self.prefix, RobustEvaluation)
        self._warned, self.result, self.examples = set(), None, None
        self.context.stage = "test" if stage == "test" else "validation"
        if stage == "fit":
            warn_about_patience(trainer, self.prefix, self.every_n_epochs)
            if trainer.global_step == 0:
                # a new training; a checkpoint is restored after this
                self.history, self._logged = [], {}
        loop = {"validate": trainer.validate_loop, "test": trainer.test_loop}.get(stage)
        if loop is not None and loop.inference_mode:
            # a module may cache tensors in forward: made in inference mode they cannot take part in autograd later
            loop.inference_mode = False
            self._switched_loop = loop
            rank_zero_debug("RobustEvaluation: evaluation runs under no_grad instead of inference_mode")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the averaged weights that a test is about."""
        tested = trainer.state.fn == "test" and "current_model_state" in checkpoint
        self._averages = checkpoint["state_dict"] if tested else None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the evaluation loop its setting back."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the evaluation loop its setting back."""
        self._release()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if there will be nothing to measure."""
        if not trainer.enable_validation:
            rank_zero_warn(
                "RobustEvaluation measures nothing in fit without validation: give a validation_step, a val_dataloader "
                "and limit_val_batches > 0",
                category=RobustDistWarning,
            )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count, if this epoch is evaluated."""
        self._begin(trainer, pl_module, trainer.val_dataloaders, due=self._is_due(trainer))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the batch; see whether the first one fits, in fit during the sanity check, before training."""
        self._keep(batch)
        if batch_idx == 0 and (trainer.sanity_checking or trainer.state.fn != "fit"):
            self._check(trainer, pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Attack the batch."""
        self._count(trainer, pl_module, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies of the epoch."""
        if self._session is not None:
            self._finish(trainer, pl_module)
            if trainer.state.fn == "fit":
                self._remember(trainer)
        elif not trainer.sanity_checking:
            # not with log(), which takes a key with one and the same set of options only
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._logged.items()})

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        warn_about_averages(pl_module, self._averages)
        self._averages = None
        self._begin(trainer, pl_module, trainer.test_dataloaders, due=True)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the batch; see whether the first one fits."""
        self._keep(batch)
        if batch_idx == 0:
            self._check(trainer, pl_module, batch)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Attack the batch."""
        self._count(trainer, pl_module, dataloader_idx)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies."""
        self._finish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report with the curves of training."""
        self._report(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report, unless validation is part of fit."""
        if trainer.state.fn != "fit":
            self._report(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report."""
        self._report(trainer)

    def _begin(self, trainer: Trainer, pl_module: LightningModule, loaders: Any, *, due: bool) -> None:
        shards = [shard_of(loader, trainer.global_rank, trainer.world_size) for loader in flatten_loaders(loaders)]
        # a distributed sampler gives every process a first batch; otherwise nobody may wait for the others
        self._everywhere = trainer.world_size > 1 and all(shard.length is not None for shard in shards)
        self._session = None
        if due:
            options = SessionOptions(
                attacks=self.attacks,
                num_examples=self.num_examples if self.space.has_pictures else 0,
                max_samples=self.max_samples,
                adapter=self.adapter,
                forward=self.forward,
                space=self.space,
                report_dir=self.report_dir,
                resume=self.resume,
                save_examples=self.save_examples,
                thorough=self.thorough,
                check_samples=self.check_samples,
                surrogate=self.surrogate,
            )
            self._session = EvaluationSession(trainer, pl_module, loaders, options, final=trainer.state.fn != "fit")

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.sanity_checking:
            return False
        if trainer.state.fn != "fit":
            return True
        epoch = trainer.current_epoch + 1
        if not self.history or epoch == trainer.max_epochs:
            return True
        # counted from the last one: with check_val_every_n_epoch a fixed grid of epochs may never be hit
        gap = epoch - self.history[-1]["epoch"]
        return gap == 0 or gap >= self.every_n_epochs

    def _check(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        together = failing_together() if self._everywhere else nullcontext()
        with together, attack_context(trainer, pl_module.device):
            view = self.space.view(pl_module, batch, self.adapter, self.forward)
            RobustTally(self.attacks).check(pl_module, view, view.x, view.y)

    def _keep(self, batch: Any) -> None:
        if self._session is not None:
            self._session.counter.keep(batch)

    def _count(self, trainer: Trainer, pl_module: LightningModule, dataloader_idx: int) -> None:
        if self._session is None:
            return
        self._session.counter.count(pl_module, dataloader_idx, attack_context(trainer, pl_module.device))
        if self._session.counter.uncertain:
            self._warn_once(
                "sampler",
                "RobustEvaluation cannot tell how the sampler spreads samples over batches and processes: some may "
                "be counted twice; use a DistributedSampler, or no sampler of your own",
            )

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._session is not None
        self._finished, self._session = self._session, None
        self.result, self.examples = self._finished.finish(trainer, pl_module)
        for name in ("gradient", "logits"):
            check = self.result.checks[name]
            if check.passed is False:
                self._warn_once(
                    name,
                    f"robust accuracy is not to be trusted: {check.detail}"
                    + ("" if name == "gradient" else f" instead of logits; {self.result.checks['gradient'].detail}")
                    + ". Let the model return logits (option forward) or attack with attack_loss='margin'",
                )
        values = accuracies(self.result)
        self._logged = {f"{self.prefix}/{name}": value for name, value in values.items()}
        log_accuracies(pl_module, values, self.prefix, self.result.num_samples)

    def _remember(self, trainer: Trainer) -> None:
        assert self.result is not None
        self.history.append(
            {
                "epoch": float(trainer.current_epoch + 1),
                "clean_acc": self.result.clean_acc,
                "acc": self.result.robust_acc,
                **{f"{name}_acc": self.result.attack_acc(name) for name in self.result.attacks},
            }
        )

    def _report(self, trainer: Trainer) -> None:
        if self.result is not None and trainer.is_global_zero:
            publish(
                trainer,
                self.result,
                self.examples,
                self.history,
                report_dir=self.report_dir,
                prefix=self.prefix,
                context=self.context,
            )
            if self._finished is not None:
                self._finished.reported()

    def _release(self) -> None:
        if self._switched_loop is not None:
            self._switched_loop.inference_mode = True
            self._switched_loop = None
        self._session = self._finished = None

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message, category=RobustDistWarning)
