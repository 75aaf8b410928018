"""Reports: what a robust evaluation found, as JSON, HTML, PNG and tables for the terminal."""

from robustdist.report.drawing import png_bytes
from robustdist.report.html import render_html
from robustdist.report.leaderboard import leaderboard_row
from robustdist.report.panels import is_drawable, plot_examples
from robustdist.report.plots import plot_attacks, plot_curve, plot_curves, plot_waterfall
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
from robustdist.report.tables import comparison_table, evaluation_table, saved_table
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
    "leaderboard_row",
    "plot_attacks",
    "plot_curve",
    "plot_curves",
    "plot_examples",
    "plot_waterfall",
    "png_bytes",
    "render_html",
    "saved_table",
    "wilson_interval",
    "write_report",
]
