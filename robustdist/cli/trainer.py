"""Lightning's Trainer with one more verb: evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from robustdist._lightning import Callback, LightningDataModule, LightningModule, Trainer
from robustdist.attacks.base import Attack
from robustdist.callbacks.robust_evaluation import RobustEvaluation
from robustdist.errors import UsageError
from robustdist.report import EvaluationResult

__all__ = ["RobustTrainer"]


class RobustTrainer(Trainer):
    """The Trainer, extended by :meth:`evaluate`; everything else is Lightning's."""

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
    ) -> EvaluationResult:
        """Measure clean and robust accuracy on the test data and write a report.

        Args:
            model: The module to evaluate.
            dataloaders: Loaders of the test data, if there is no datamodule.
            datamodule: Data module with a test loader.
            ckpt_path: Checkpoint to load; "best" or "last" as in ``test``; None for the weights as they are.
            attacks: Attacks by name; default those of the configured RobustEvaluation.
            report_dir: Folder for report.json, report.html and the pictures.
            max_samples: Evaluate only the first samples; None for all.

        Returns:
            The result, equal on all processes.

        Raises:
            UsageError: If there are no attacks, or the checkpoint does not exist.
        """
        configured = next((c for c in self.callbacks if isinstance(c, RobustEvaluation)), None)
        if attacks is None:
            if configured is None:
                raise UsageError("evaluate has no attacks: give --attacks, or configure a RobustEvaluation callback")
            attacks = configured.attacks
        evaluation = RobustEvaluation(attacks=attacks, report_dir=report_dir, max_samples=max_samples)
        if configured is not None:
            evaluation.adapter, evaluation.forward = configured.adapter, configured.forward
            evaluation.history = configured.history
        return self.evaluate_with(evaluation, model, dataloaders, datamodule, ckpt_path)

    def evaluate_with(
        self,
        evaluation: RobustEvaluation,
        model: LightningModule,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> EvaluationResult:
        """Run ``test`` with ``evaluation`` in the place of the configured ones; arguments as in :meth:`evaluate`."""
        check_checkpoint(ckpt_path)
        kept = list(self.callbacks)
        self.callbacks = [callback for callback in kept if not isinstance(callback, RobustEvaluation)] + [evaluation]
        try:
            self.test(model, dataloaders=dataloaders, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
        finally:
            self.callbacks = kept
        if evaluation.result is not None:
            return evaluation.result
        # the fork and spawn launchers evaluate in workers whose objects do not come back; the report does
        assert evaluation.report_dir is not None
        report = json.loads((Path(evaluation.report_dir) / "report.json").read_text())
        return EvaluationResult.from_dict(report)


def check_checkpoint(ckpt_path: str | None) -> None:
    """Refuse a checkpoint path that leads nowhere.

    Raises:
        UsageError: If ``ckpt_path`` is neither a file or folder nor a word or address that Lightning understands.
    """
    if ckpt_path is None or ckpt_path in ("best", "last", "hpc", "registry") or ":" in ckpt_path:
        return
    if not Path(ckpt_path).exists():
        raise UsageError(f"ckpt_path={ckpt_path!r} does not exist: give the path of a checkpoint file")
