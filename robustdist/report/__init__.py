"""Reports: what a robust evaluation found, as JSON, HTML, PNG and tables for the terminal."""

from robustdist.report.html import render_html
from robustdist.report.plots import is_drawable, plot_attacks, plot_curves, plot_examples, png_bytes
from robustdist.report.result import (
    AttackScore,
    Check,
    ClassScore,
    CurvePoint,
    EvaluationResult,
    Examples,
    SavedScore,
    Step,
    wilson_interval,
)
from robustdist.report.tables import comparison_table, evaluation_table
from robustdist.report.writer import write_report

__all__ = [
    "AttackScore",
    "Check",
    "ClassScore",
    "CurvePoint",
    "EvaluationResult",
    "Examples",
    "SavedScore",
    "Step",
    "comparison_table",
    "evaluation_table",
    "is_drawable",
    "plot_attacks",
    "plot_curves",
    "plot_examples",
    "png_bytes",
    "render_html",
    "wilson_interval",
    "write_report",
]
