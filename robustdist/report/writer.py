"""The files of a report: JSON for programs, HTML and PNG for people."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from robustdist.core.files import write_whole
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.report.drawing import png_bytes
from robustdist.report.html import render_html
from robustdist.report.leaderboard import leaderboard_row
from robustdist.report.panels import is_drawable, plot_examples
from robustdist.report.plots import plot_attacks, plot_curve, plot_curves, plot_waterfall
from robustdist.report.result import EvaluationResult, Examples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_report"]


def write_report(
    directory: Path,
    result: EvaluationResult,
    *,
    history: Sequence[Mapping[str, float]] = (),
    examples: Examples | None = None,
    comparison: Mapping[str, EvaluationResult] = MappingProxyType({}),
    train_seconds: Mapping[str, float] = MappingProxyType({}),
    about: Mapping[str, str] = MappingProxyType({}),
    leaderboard: Mapping[str, Any] = MappingProxyType({}),
    title: str = "Robust evaluation",
) -> list[Path]:
    """Write ``report.json``, ``report.html`` and the pictures that the arguments allow for.

    Every file is complete or absent, also when the process dies while writing. Without matplotlib there are no
    pictures, everything else is the same.

    Args:
        directory: Folder of the report, created if needed.
        result: The evaluation that the report is about.
        history: Evaluated epochs as :func:`plot_curves` takes them; drawn in ``curves.png``.
        examples: A few samples, drawn in ``examples.png`` if they are images of 1 or 3 channels.
        comparison: Evaluations by name of the model, all rows of the comparison; drawn in ``attacks.png``.
        train_seconds: Seconds of training by name of the model.
        about: What was judged: "model", "stage" and "checkpoint", as far as known.
        leaderboard: Fields of the leaderboard row that only the user knows.
        title: Heading of the page.

    Returns:
        The paths written, ``report.json`` first and ``report.html`` last.

    Raises:
        UsageError: If ``directory`` is a file.

    Warns:
        RobustDistWarning: If matplotlib is missing.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"report_dir={str(directory)!r} is a file: choose a folder")
    directory.mkdir(parents=True, exist_ok=True)
    content = result.to_dict()
    if comparison:
        content["comparison"] = {name: other.to_dict() for name, other in comparison.items()}
    if history:
        content["history"] = [dict(entry) for entry in history]
    if train_seconds:
        content["train_seconds"] = dict(train_seconds)
    content.update(about)
    row = leaderboard_row(result, leaderboard, about.get("model"))
    content["leaderboard"] = row
    written = [write_whole(directory / "report.json", _json(content))]

    pictures = _pictures(result, history, examples, comparison or {title: result})
    images = {}
    try:
        for name, (caption, draw) in pictures.items():
            images[caption] = png_bytes(draw())
            written.append(write_whole(directory / name, images[caption]))
    except UsageError as error:
        warnings.warn(f"the report in {directory} lacks its pictures: {error}", RobustDistWarning, stacklevel=2)

    page = render_html(
        title,
        result,
        comparison=comparison,
        train_seconds=train_seconds,
        images=images,
        about=about,
        leaderboard=row,
    )
    written.append(write_whole(directory / "report.html", page.encode("utf-8", "xmlcharrefreplace")))
    return written


def _pictures(
    result: EvaluationResult,
    history: Sequence[Mapping[str, float]],
    examples: Examples | None,
    models: Mapping[str, EvaluationResult],
) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """Return captions and how to draw, by the name of the file."""
    eps, bounds = result.threat_model.get("eps"), result.threat_model.get("bounds")
    radius = float(eps) if isinstance(eps, (int, float)) else None
    pictures: dict[str, tuple[str, Callable[[], Figure]]] = {}
    if history:
        pictures["curves.png"] = ("Validation accuracy by epoch", partial(plot_curves, history))
    pictures["attacks.png"] = ("Accuracy by attack", partial(plot_attacks, models))
    if result.waterfall:
        pictures["waterfall.png"] = (
            "What is still right after each attack, and after each stage of one",
            partial(plot_waterfall, result.waterfall, result.num_samples),
        )
    for name, points in result.curves.items():
        against = "the radius" if name == "eps" else name
        caption = f"Accuracy against {against} of projected gradient descent, on {points[0].num_samples} samples"
        pictures[f"{name}.png"] = (caption, partial(plot_curve, points, name, radius if name == "eps" else None))
    if examples is not None and is_drawable(examples):
        pictures["examples.png"] = (
            "Samples before and after the attack that fooled the model, or the first of all",
            partial(plot_examples, examples, radius or 0.0, bounds=bounds),
        )
    return pictures


def _json(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(_plain(content), allow_nan=False, ensure_ascii=False, indent=2)
    return (text + "\n").encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Return what JSON can hold; a number that is not finite becomes null, an unknown object its text."""
    if isinstance(value, Tensor):
        value = value.tolist()
    elif hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value)
