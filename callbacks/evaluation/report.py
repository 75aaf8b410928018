"""How a robust evaluation makes its result known: logs, figures, a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from robustdist._lightning import LightningModule, Trainer, rank_zero_info
from robustdist.report import EvaluationResult, Examples, wilson_interval, write_report
from robustdist.report.loggers import log_figures

__all__ = ["ReportContext", "accuracies", "log_accuracies", "publish"]


@dataclass
class ReportContext:
    """What a report shows beside the result.

    Attributes:
        comparison: Other models by name.
        label: Name of this one among them.
        train_seconds: Seconds of training by name of the model.
        checkpoint: Where the weights came from.
        title: Heading.
        stage: "validation" or "test".
        leaderboard: Fields of the leaderboard row that only the user knows.
    """

    comparison: dict[str, EvaluationResult] = field(default_factory=dict)
    label: str = "this model"
    train_seconds: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    title: str = "Robust evaluation"
    stage: str = ""
    leaderboard: Mapping[str, Any] = field(default_factory=dict)


def accuracies(result: EvaluationResult) -> dict[str, float]:
    """Return what is logged, by key without its prefix."""
    low, high = wilson_interval(result.num_robust, result.num_samples)
    values = {"clean_acc": result.clean_acc, "acc": result.robust_acc, "acc_low": low, "acc_high": high}
    values |= {f"{name}_acc": result.attack_acc(name) for name in result.attacks}
    if len(result.loaders) > 1:
        values |= {f"loader{score.label}_acc": score.robust_acc for score in result.loaders}
        values["worst_loader_acc"] = min(score.robust_acc for score in result.loaders)
    return values


def log_accuracies(pl_module: LightningModule, values: Mapping[str, float], prefix: str, num_samples: int) -> None:
    """Log through the module, so that monitors and loggers find the values."""
    for name, value in values.items():
        # equal on all ranks already; sync_dist only keeps Lightning from warning
        pl_module.log(
            f"{prefix}/{name}",
            torch.tensor(value, device=pl_module.device),
            prog_bar=name in ("clean_acc", "acc"),
            sync_dist=True,
            batch_size=num_samples,
        )


def publish(
    trainer: Trainer,
    result: EvaluationResult,
    examples: Examples | None,
    history: list[dict[str, float]],
    *,
    report_dir: str | None,
    prefix: str,
    context: ReportContext,
) -> None:
    """Hand figures to the loggers and write the report; on rank zero."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return  # a report of a batch or two must not take the place of a real one
    log_figures(trainer.loggers, history, examples, result, trainer.global_step, prefix=prefix)
    if report_dir is None:
        return
    about = {"model": type(trainer.lightning_module).__name__, "stage": context.stage}
    if context.checkpoint is not None:
        about["checkpoint"] = context.checkpoint
    write_report(
        Path(report_dir),
        result,
        history=history,
        examples=examples,
        comparison={**context.comparison, context.label: result} if context.comparison else {},
        train_seconds=context.train_seconds,
        about=about,
        leaderboard=context.leaderboard,
        title=context.title,
    )
    rank_zero_info(f"robust evaluation: {Path(report_dir) / 'report.html'}")
