"""Pictures for experiment loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from robustdist.report.panels import is_drawable, plot_examples
from robustdist.report.plots import plot_attacks, plot_curves
from robustdist.report.result import EvaluationResult, Examples

__all__ = ["log_figures"]


def log_figures(
    loggers: Sequence[Any],
    history: Sequence[Mapping[str, float]],
    examples: Examples | None,
    result: EvaluationResult,
    step: int,
    *,
    prefix: str = "robust",
) -> None:
    """Hand curves, attacks and examples to every logger that takes figures (TensorBoard); others are passed over.

    Without matplotlib nothing is drawn: the numbers are in the loggers all the same.
    """
    experiments: list[Any] = [getattr(logger, "experiment", None) for logger in loggers]
    writers = [experiment for experiment in experiments if hasattr(experiment, "add_figure")]
    if not writers or find_spec("matplotlib") is None:
        return
    figures = {f"{prefix}/attacks": plot_attacks({"model": result})}
    if len(history) > 1:
        figures[f"{prefix}/curves"] = plot_curves(history)
    if examples is not None and is_drawable(examples):
        model = result.threat_model
        figures[f"{prefix}/examples"] = plot_examples(examples, model["eps"] or 0.0, bounds=model["bounds"])
    for writer in writers:
        for name, figure in figures.items():
            writer.add_figure(name, figure, global_step=step)
