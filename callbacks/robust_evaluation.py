"""Robust accuracy in validation and test."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustdist._lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_same_package,
    rank_zero_debug,
    rank_zero_info,
    rank_zero_warn,
)
from robustdist.attacks.base import Attack
from robustdist.attacks.pgd import PGD
from robustdist.core.batch import BatchAdapter
from robustdist.core.forward import Forward, bind_forward
from robustdist.core.ranks import failing_together
from robustdist.core.redirect import check_module_can_be_called
from robustdist.core.sharding import Shard, fingerprint, flatten_loaders, shard_of
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.evaluation import RobustTally
from robustdist.report import EvaluationResult, Examples, wilson_interval, write_report
from robustdist.report.loggers import log_figures

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
    have more patience than ``every_n_epochs``. Several loaders of one stage are counted together. A second evaluation
    in the same Trainer needs a ``prefix`` of its own.

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
    ) -> None:
        if attacks is not None and (not isinstance(attacks, Mapping) or not attacks):
            raise UsageError("attacks must map names to attacks, for example {'pgd20': PGD(steps=20)}")
        for name, attack in (attacks or {}).items():
            if not isinstance(attack, Attack):
                raise UsageError(f"attacks[{name!r}]={attack!r} is not an attack of robustdist.attacks: create one")
            if name == "clean" or "/" in name:
                raise UsageError(
                    f"attacks[{name!r}] would be logged as another key: choose a name without slashes, not clean"
                )
            if attack.targeted:
                raise UsageError(
                    f"attacks[{name!r}] is targeted, but an evaluation knows only true labels: use an untargeted attack"
                )
        if report_dir is not None and Path(report_dir).is_file():
            raise UsageError(f"report_dir={report_dir!r} is a file: choose a folder")
        for option, value in (("every_n_epochs", every_n_epochs), ("max_samples", max_samples)):
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
        #: Result of the last finished evaluation.
        self.result: EvaluationResult | None = None
        #: Images of the last finished evaluation (rank zero).
        self.examples: Examples | None = None
        #: One entry per evaluated epoch of fit: "epoch", "clean_acc", "acc", "<name>_acc".
        self.history: list[dict[str, float]] = []
        #: What a report shows beside the result: other models by name, the name of this one, training times, a title.
        self.comparison: dict[str, EvaluationResult] = {}
        self.label = "this model"
        self.train_seconds: dict[str, float] = {}
        self.checkpoint: str | None = None
        self.title = "Robust evaluation"
        self._tally: RobustTally | None = None
        self._places: dict[int, int] = {}
        self._stage = ""
        self._warned: set[str] = set()
        self._switched_loop: Any = None
        self._shards: list[Shard] = []
        self._batch: tuple[Any, Tensor, Any] | None = None
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
            self._check_combination(trainer, pl_module)
        self._warned, self.result, self.examples = set(), None, None
        self._stage = "test" if stage == "test" else "validation"
        if stage == "fit":
            self._check_monitors(trainer)
            if trainer.global_step == 0:
                # a new training; a checkpoint is restored after this
                self.history, self._logged = [], {}
        loop = {"validate": trainer.validate_loop, "test": trainer.test_loop}.get(stage)
        if loop is not None and loop.inference_mode:
            # a module may cache tensors in forward: made in inference mode they cannot take part in autograd later
            loop.inference_mode = False
            self._switched_loop = loop
            rank_zero_debug("RobustEvaluation: evaluation runs under no_grad instead of inference_mode")

    def _check_combination(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_same_package(pl_module)
        check_module_can_be_called(trainer.strategy, option="RobustEvaluation")
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [callback for callback in callbacks if isinstance(callback, RobustEvaluation)]
        if sum(callback.prefix == self.prefix for callback in others) > 1:
            raise UsageError(
                f"two RobustEvaluation callbacks log as {self.prefix}/acc, and Lightning would average them: "
                "give one of them another prefix, or put all attacks into one"
            )
        for step in (pl_module.validation_step, pl_module.test_step):
            if "dataloader_iter" in inspect.signature(step).parameters:
                raise UsageError(
                    f"RobustEvaluation needs the batch, but {step.__name__}(dataloader_iter) fetches its own: "
                    f"write {step.__name__}(self, batch, batch_idx)"
                )

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
        self._update(trainer, pl_module, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies of the epoch."""
        if self._tally is not None:
            self._finish(trainer, pl_module)
            if trainer.state.fn == "fit":
                self._remember(trainer)
        elif not trainer.sanity_checking:
            # not with log(), which takes a key with one and the same set of options only
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._logged.items()})

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
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
        self._update(trainer, pl_module, dataloader_idx)

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
        flat = flatten_loaders(loaders)
        self._shards = [shard_of(loader, trainer.global_rank, trainer.world_size) for loader in flat]
        self._places = {}
        self._tally = RobustTally(self.attacks, self.num_examples) if due else None
        shared = [place for place, shard in enumerate(self._shards) if shard.keep_every > 1]
        if due and shared:
            # every process walks through a whole data set: is it the same one, or the share of each?
            prints = torch.tensor([fingerprint(flat[place]) for place in shared], device=pl_module.device)
            highest = trainer.strategy.reduce(torch.stack([prints, -prints]), reduce_op="max")
            for place, differs in zip(shared, (highest[0] != -highest[1]).tolist(), strict=True):
                if differs:
                    self._shards[place] = Shard(trainer.world_size, trainer.global_rank, exact=False)

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

    def _check_monitors(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            patience = getattr(callback, "patience", None)
            monitored = str(getattr(callback, "monitor", None)).startswith(f"{self.prefix}/")
            if monitored and patience is not None and patience < self.every_n_epochs:
                rank_zero_warn(
                    f"{type(callback).__name__} stops after {patience} epochs without a better {callback.monitor}, but "
                    f"every_n_epochs={self.every_n_epochs} is less often: raise patience or lower every_n_epochs",
                    category=RobustDistWarning,
                )

    def _check(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        # a distributed sampler gives every process a first batch; otherwise nobody may wait for the others
        everywhere = all(shard.length is not None for shard in self._shards) and trainer.world_size > 1
        with failing_together() if everywhere else nullcontext():
            x, y, *_ = self.adapter.locate(batch)
            with _attack_context(trainer, pl_module.device):
                RobustTally(self.attacks).check(pl_module, bind_forward(pl_module, self.forward, batch), x, y)

    def _keep(self, batch: Any) -> None:
        if self._tally is not None:
            # a step may take entries out of its batch, or write into its tensors
            x, y, *_ = self.adapter.locate(batch)
            x, y = x.clone(), y.clone() if isinstance(y, Tensor) else y
            self._batch = self.adapter.replace(batch, x), x, y

    def _update(self, trainer: Trainer, pl_module: LightningModule, dataloader_idx: int) -> None:
        if self._tally is None or self._batch is None:
            return
        (batch, x, y), self._batch = self._batch, None
        shard = self._shards[dataloader_idx]
        # several loaders at once: which of them hands out this input cannot be told
        combined = len(self._shards) > 1 and len(self.adapter.locate(batch).input_path) > 1
        if combined or not shard.exact:
            self._tally.mark_uncertain()
            self._warn_once(
                "sampler",
                "RobustEvaluation cannot tell how the sampler spreads samples over batches and processes: some may "
                "be counted twice; use a DistributedSampler, or no sampler of your own",
            )
        start = self._places.get(dataloader_idx, 0)
        self._places[dataloader_idx] = start + len(x)
        ids = shard.sample_ids(start, len(x))
        if self.max_samples is not None:
            ids = [None if sample_id is None or sample_id >= self.max_samples else sample_id for sample_id in ids]
        counted = [row for row, sample_id in enumerate(ids) if sample_id is not None]
        if not counted:
            return
        forward = bind_forward(pl_module, self.forward, batch)
        whole_batch = callable(self.forward)
        if not whole_batch and len(counted) < len(x):
            x, y, ids = x[counted], y[counted], [ids[row] for row in counted]
        with _attack_context(trainer, pl_module.device):
            self._tally.update(pl_module, forward, x, y, ids, whole_batch=whole_batch)

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._tally is not None

        def reduce(tensor: Tensor, operation: str) -> Tensor:
            reduced = trainer.strategy.reduce(tensor.to(pl_module.device), reduce_op=operation)
            return torch.as_tensor(reduced).cpu()

        self._tally.reduce(reduce)
        self.result = self._tally.result()
        self.examples = self._tally.examples
        self._tally = None
        for name in ("gradient", "logits"):
            check = self.result.checks[name]
            if not check.passed:
                self._warn_once(
                    name,
                    f"robust accuracy is not to be trusted: {check.detail}"
                    + ("" if name == "gradient" else f" instead of logits; {self.result.checks['gradient'].detail}")
                    + ". Let the model return logits (option forward) or attack with attack_loss='margin'",
                )
        self._log(pl_module, self.result)

    def _log(self, pl_module: LightningModule, result: EvaluationResult) -> None:
        low, high = wilson_interval(result.num_robust, result.num_samples)
        values = {"clean_acc": result.clean_acc, "acc": result.robust_acc, "acc_low": low, "acc_high": high}
        values.update({f"{name}_acc": result.attack_acc(name) for name in result.attacks})
        self._logged = {f"{self.prefix}/{name}": value for name, value in values.items()}
        for name, value in values.items():
            # equal on all ranks already; sync_dist only keeps Lightning from warning
            pl_module.log(
                f"{self.prefix}/{name}",
                torch.tensor(value, device=pl_module.device),
                prog_bar=name in ("clean_acc", "acc"),
                sync_dist=True,
                batch_size=result.num_samples,
            )

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
        if self.result is None or not trainer.is_global_zero:
            return
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            step = trainer.global_step
            log_figures(trainer.loggers, self.history, self.examples, self.result, step, prefix=self.prefix)
        if self.report_dir is not None:
            about = {"model": type(trainer.lightning_module).__name__, "stage": self._stage}
            if self.checkpoint is not None:
                about["checkpoint"] = self.checkpoint
            comparison = {**self.comparison, self.label: self.result} if self.comparison else {}
            write_report(
                Path(self.report_dir),
                self.result,
                history=self.history,
                examples=self.examples,
                comparison=comparison,
                train_seconds=self.train_seconds,
                about=about,
                title=self.title,
            )
            rank_zero_info(f"robust evaluation: {Path(self.report_dir) / 'report.html'}")

    def _release(self) -> None:
        if self._switched_loop is not None:
            self._switched_loop.inference_mode = True
            self._switched_loop = None
        self._tally = self._batch = None

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message, category=RobustDistWarning)


@contextmanager
def _attack_context(trainer: Trainer, device: torch.device) -> Iterator[None]:
    """Run forward passes as the precision plugin does, with the default dtype of "true" precisions, but no autocast."""
    with trainer.precision_plugin.val_step_context(), torch.autocast(device.type, enabled=False):
        yield
