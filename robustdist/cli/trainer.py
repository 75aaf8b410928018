"""Lightning's Trainer with more verbs: evaluate, remeasure, plan and export."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from robustdist._lightning import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    WeightAveraging,
    rank_zero_warn,
)
from robustdist.attacks.base import Attack
from robustdist.callbacks.pruning.plan import plan_of
from robustdist.callbacks.robust_evaluation import RobustEvaluation
from robustdist.callbacks.structured_pruning import StructuredPruning
from robustdist.cli.exporting import at_first_batch, export_checkpoint
from robustdist.cli.remeasure import Remeasurement
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning.export import Exported
from robustdist.pruning.loading import read_checkpoint, recipe_of
from robustdist.pruning.plan import PruningPlan
from robustdist.report import EvaluationResult, SavedScore

__all__ = ["RobustTrainer"]


class RobustTrainer(Trainer):
    """The Trainer, extended by the verbs evaluate, remeasure, plan and export; everything else is Lightning's."""

    callbacks: list[Callback]

    def evaluate(
        self,
        model: LightningModule,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        attacks: dict[str, Attack] | None = None,
        report_dir: str = "robustdist_report",
        max_samples: int | None = None,
        thorough: bool = True,
        check_samples: int = 200,
        resume: bool = True,
        save_examples: bool = False,
        leaderboard: dict[str, Any] | None = None,
    ) -> EvaluationResult:
        """Measure clean and robust accuracy on the test data and write a report.

        Args:
            model: The module to evaluate.
            dataloaders: Loaders of the test data, if there is no datamodule.
            datamodule: Data module with a test loader.
            ckpt_path: Checkpoint to load; None for the weights as they are.
            attacks: Attacks by name; default those of the configured RobustEvaluation.
            report_dir: Folder for report.json, report.html and the pictures.
            max_samples: Evaluate only the first samples; None for all.
            thorough: Examine the evaluation with attacks of its own on some images: all checks, and curves.
            check_samples: How many images.
            resume: Go on where a killed evaluation with the same weights, attacks and images stopped.
            save_examples: Save adversarial examples in report_dir and measure them again from there.
            leaderboard: Fields of the leaderboard row that only you know: name, authors, link, venue, dataset, ...

        Returns:
            The result, equal on all processes.

        Raises:
            UsageError: If there are no attacks, or the checkpoint does not exist.
        """
        check_checkpoint(ckpt_path)
        if ckpt_path == "best" and self.best_checkpoint is None:
            raise UsageError("ckpt_path='best' is known only to the run that saved it: give the path of the checkpoint")
        if ckpt_path is None:
            rank_zero_warn(
                "evaluate without ckpt_path judges the weights that the module has from its constructor",
                category=RobustDistWarning,
            )
        evaluation = self.judge(
            attacks,
            report_dir,
            max_samples,
            thorough=thorough,
            check_samples=check_samples,
            resume=resume,
            save_examples=save_examples,
            leaderboard=leaderboard,
        )
        return self.evaluate_with(evaluation, model, dataloaders, datamodule, ckpt_path)

    def remeasure(
        self,
        model: LightningModule,
        examples: str,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        attacks: dict[str, Attack] | None = None,
    ) -> SavedScore:
        """Measure saved adversarial examples again, and leave the result beside them as JSON.

        Args:
            model: The module to judge.
            examples: File that ``evaluate`` saved.
            dataloaders: Loaders of the test data, if there is no datamodule; only one batch is fetched.
            datamodule: Data module with a test loader.
            ckpt_path: Checkpoint to load; None for the weights as they are.
            attacks: Attacks whose ``mean`` and ``std`` say how the model's inputs are normalised; default those of the
                configured RobustEvaluation.

        Raises:
            UsageError: If a file does not exist.
        """
        check_checkpoint(ckpt_path)
        configured = [callback for callback in self.callbacks if isinstance(callback, RobustEvaluation)]
        if attacks is None:
            attacks = configured[0].attacks if configured else {}
        units = next(iter(attacks.values()), None)
        measurement = Remeasurement(examples, units, configured[0].forward if configured else None)
        kept, batches = list(self.callbacks), self.limit_test_batches
        self.callbacks = [callback for callback in kept if not isinstance(callback, RobustEvaluation)] + [measurement]
        self.limit_test_batches = 1
        try:
            with quiet():
                self.test(model, dataloaders=dataloaders, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
        finally:
            self.callbacks, self.limit_test_batches = kept, batches
        return measurement.result()

    def plan(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> PruningPlan:
        """Say what the configured StructuredPruning would find and remove, by the magnitude of the weights.

        Training begins as usual and is broken off at its first batch: no step is taken, nothing is saved.

        Args:
            model: The dense module.
            train_dataloaders: Loaders of the training data, if there is no datamodule.
            datamodule: Data module with a training loader.
            ckpt_path: Dense checkpoint whose weights to rank; None for the weights as they are.
            weights_only: Known from configurations of ``fit``; checkpoints are always read so.

        Raises:
            UsageError: If there is no StructuredPruning, the checkpoint is pruned already, or as it would be raised
                at the first batch of a fit.
        """
        configured = [callback for callback in self.callbacks if isinstance(callback, StructuredPruning)]
        if not configured:
            raise UsageError(
                "plan needs the StructuredPruning that it shall tell about: add configs/prune/half_macs.yaml after "
                "your own config, or put it into trainer.callbacks"
            )
        if ckpt_path is not None:
            checkpoint = read_checkpoint(ckpt_path)
            if recipe_of(checkpoint) is not None:
                raise UsageError(f"ckpt_path={ckpt_path!r} holds a model that is pruned already: give a dense one")
            model.load_state_dict(checkpoint["state_dict"])
        with quiet():
            return at_first_batch(
                self, lambda module, batch: plan_of(configured[0], module, batch), model, train_dataloaders, datamodule
            )

    def export(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        onnx: str | None = None,
        torch_export: str | None = None,
        forward: str | None = None,
        input_shape: list[int] | None = None,
        tolerance: float = 1e-4,
    ) -> list[Exported]:
        """Write a trained model as ONNX or exported program, for any batch size, once it agrees with the model.

        Pruned checkpoints are loaded with their structure. The input is of ``input_shape``, else the module's
        ``example_input_array``, else of the first training batch.

        Args:
            model: The dense module, as its class makes it.
            train_dataloaders: Loaders of the training data, if there is no datamodule.
            datamodule: Data module with a training loader.
            ckpt_path: Checkpoint to load.
            weights_only: Known from configurations of ``fit``; checkpoints are always read so.
            onnx: ONNX file to write.
            torch_export: File of torch.export to write.
            forward: Path of the part to export; None for the module itself.
            input_shape: Shape of one floating-point input without the batch, for example [3, 32, 32].
            tolerance: Largest allowed difference to the outputs of the model, relative where these are above 1.

        Raises:
            UsageError: If a file or package is missing, the model cannot be exported or differs.
        """
        with quiet():
            return export_checkpoint(
                self,
                model,
                train_dataloaders,
                datamodule,
                ckpt_path=ckpt_path,
                files={"onnx": onnx, "torch_export": torch_export},
                forward=forward,
                input_shape=input_shape,
                tolerance=tolerance,
            )

    def judge(
        self, attacks: dict[str, Attack] | None, report_dir: str, max_samples: int | None, **options: Any
    ) -> RobustEvaluation:
        """Return an evaluation that finds inputs and logits as the configured ones do.

        Args:
            attacks: Attacks by name; default those of all configured RobustEvaluations together.
            report_dir: Folder of its report.
            max_samples: Evaluate only the first samples; None for all.
            **options: Further arguments of RobustEvaluation.

        Raises:
            UsageError: If there are no attacks, or two of one name.
        """
        configured = [callback for callback in self.callbacks if isinstance(callback, RobustEvaluation)]
        if attacks is None:
            attacks = {}
            for name, attack in (pair for callback in configured for pair in callback.attacks.items()):
                if name in attacks and attacks[name].settings() != attack.settings():
                    raise UsageError(
                        f"two RobustEvaluation callbacks have an attack named {name!r}: rename one, or give attacks"
                    )
                attacks[name] = attack
        if not attacks:
            raise UsageError("there are no attacks to evaluate: give attacks, or configure a RobustEvaluation callback")
        if configured:
            options = {"space": configured[0].space, "surrogate": configured[0].surrogate, **options}
        evaluation = RobustEvaluation(attacks=attacks, report_dir=report_dir, max_samples=max_samples, **options)
        if configured:
            evaluation.adapter, evaluation.forward = configured[0].adapter, configured[0].forward
        return evaluation

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the checkpoint that the first ModelCheckpoint found best; None if it saved none."""
        return getattr(self.checkpoint_callback, "best_model_path", "") or None

    def evaluate_with(
        self,
        evaluation: RobustEvaluation,
        model: LightningModule,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> EvaluationResult:
        """Run ``test`` with ``evaluation`` in the place of the configured ones; arguments as in :meth:`evaluate`."""
        evaluation.context.checkpoint = ckpt_path
        kept = list(self.callbacks)
        # a WeightAveraging that has trained here would load the weights behind the averages
        apart = (RobustEvaluation, WeightAveraging)
        self.callbacks = [callback for callback in kept if not isinstance(callback, apart)] + [evaluation]
        try:
            with quiet():
                self.test(model, dataloaders=dataloaders, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
        finally:
            self.callbacks = kept
        if evaluation.result is not None:
            return evaluation.result
        # the fork and spawn launchers evaluate in workers whose objects do not come back; the report does
        assert evaluation.report_dir is not None
        report = json.loads((Path(evaluation.report_dir) / "report.json").read_text())
        return EvaluationResult.from_dict(report)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # other callbacks' states are not needed here, and padded samples are not counted
        warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
        warnings.filterwarnings("ignore", message=".*Using `DistributedSampler` with the dataloaders.*")
        yield


def check_checkpoint(ckpt_path: str | None) -> None:
    """Refuse a checkpoint path that leads nowhere.

    Raises:
        UsageError: If ``ckpt_path`` is neither a file or folder nor a word or address that Lightning understands.
    """
    if ckpt_path is None or ckpt_path in ("best", "last", "hpc", "registry") or ":" in ckpt_path:
        return
    if not Path(ckpt_path).exists():
        raise UsageError(f"ckpt_path={ckpt_path!r} does not exist: give the path of a checkpoint file")
