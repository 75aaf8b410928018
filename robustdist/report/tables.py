"""Evaluation results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from robustdist.report.result import EvaluationResult, SavedScore
from robustdist.report.text import (
    attack_names,
    bound_text,
    checks_text,
    interval_text,
    percent,
    seconds_text,
    short_settings,
    threat_model_text,
)

__all__ = ["comparison_table", "evaluation_table", "plain_table", "saved_table"]

# Names come from users: they enter as Text, which rich does not read as markup.


def plain_table(title: str, caption: str, caption_style: str = "dim") -> Table:
    """Return an empty table in the house style; heading and caption only where they are not empty."""
    return Table(
        title=Text(title, style="bold") if title else None,
        caption=Text(caption, style=caption_style) if caption else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )


def evaluation_table(result: EvaluationResult, title: str) -> Table:
    """Return one evaluation: clean, every attack and the worst case over them.

    Args:
        result: The evaluation.
        title: Heading of the table.

    Returns:
        A table that fits into 80 columns; accuracies in percent with their 95 % Wilson interval. The seconds of the
        worst case are the sum over the attacks.
    """
    lines = [
        f"{result.num_samples} samples; the worst case is an {bound_text(result)}"
        if bound_text(result) == "upper bound"
        else f"{result.num_samples} samples",
        f"threat model: {threat_model_text(result.threat_model)}",
        checks_text(result),
    ]
    table = plain_table(title, "\n".join(filter(None, lines)), "bold red" if result.failed_checks else "dim")
    table.add_column("attack", overflow="fold", max_width=24)
    table.add_column("accuracy %", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")

    def add(name: str, correct: int, seconds: str, settings: str, style: str = "") -> None:
        accuracy = percent(correct / max(1, result.num_samples))
        interval = interval_text(correct, result.num_samples)
        table.add_row(Text(name), accuracy, interval, seconds, Text(settings), style=style)

    add("clean", result.num_clean, "", "")
    for name, score in result.attacks.items():
        add(name, score.num_robust, seconds_text(score.seconds), short_settings(score.settings))
    table.add_section()
    total = sum(score.seconds for score in result.attacks.values())
    add("worst case", result.num_robust, seconds_text(total), "right under every attack", style="bold")
    return table


def comparison_table(
    results: Mapping[str, EvaluationResult],
    train_seconds: Mapping[str, float],
    highlight: str | None = None,
) -> Table:
    """Return one row per model, accuracies in percent.

    Args:
        results: Evaluations by name of the model.
        train_seconds: Seconds of training by name of the model; without any the column is left out.
        highlight: Name of the model to print bold.

    Returns:
        A table with the columns clean, every attack in order, worst case and training seconds; "-" where a model was
        not evaluated under an attack.
    """
    names = attack_names(results.values())
    table = plain_table("", "accuracy in %, worst case: right under every attack")
    table.add_column("model", overflow="fold", min_width=8)
    for name in ("clean", *names, "worst case"):
        table.add_column(Text(name), justify="right", overflow="fold", min_width=5)
    if train_seconds:
        table.add_column("training s", justify="right")
    for model, result in results.items():
        cells: list[str | Text] = [Text(model), percent(result.clean_acc)]
        cells += [percent(result.attack_acc(name)) if name in result.attacks else "-" for name in names]
        cells.append(percent(result.robust_acc))
        if train_seconds:
            cells.append(seconds_text(train_seconds[model]) if model in train_seconds else "-")
        table.add_row(*cells, style="bold" if model == highlight else "")
    return table


def saved_table(score: SavedScore) -> Table:
    """Return the accuracy on saved adversarial examples, in percent with its 95 % interval."""
    table = plain_table("Saved adversarial examples", f"{score.num_samples} images from {score.file}")
    table.add_column("pixels")
    table.add_column("accuracy %", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for pixels, right in (("float32, as saved", score.num_right), ("rounded to 8 bit", score.num_right_8bit)):
        if right is not None:
            share = percent(right / max(1, score.num_samples))
            table.add_row(pixels, share, interval_text(right, score.num_samples))
    return table
