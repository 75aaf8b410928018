"""Evaluation results as pictures.

Every function returns a figure made with matplotlib's objects alone, without pyplot: nothing global changes and no
window opens. The colours are those of Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from robustdist.errors import UsageError
from robustdist.report.result import EvaluationResult, Examples, wilson_interval
from robustdist.report.text import attack_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["is_drawable", "plot_attacks", "plot_curves", "plot_examples", "png_bytes"]

_INK = "#222222"
_MUTED = "#666666"
_GRID = "#dddddd"
_CLEAN = "#0072b2"
_WORST = "#d55e00"
_ATTACKS = ("#009e73", "#cc79a7", "#56b4e9", "#222222", "#8c96a0")
_MODELS = ("#8c96a0", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
_LINES = ((0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
_LONGEST_NAME = 18
_FEW_POINTS = 25
_CELL = 1.25  # inches of one image


def png_bytes(figure: Figure, dpi: int = 170) -> bytes:
    """Return ``figure`` as a PNG file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def plot_curves(history: Sequence[Mapping[str, float]]) -> Figure:
    """Plot accuracy over the epochs: clean, under each attack, worst case.

    Args:
        history: One mapping per evaluated epoch with ``epoch``, ``clean_acc``, ``acc`` (worst case) and
            ``<name>_acc`` per attack; a missing or non-finite value leaves a gap.

    Raises:
        UsageError: If ``history`` is empty, or matplotlib is missing.
    """
    if not history:
        raise UsageError("history is empty: there is no epoch to plot")
    figure = _new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    _style(axes)
    epochs = [float(entry.get("epoch", index)) for index, entry in enumerate(history)]
    marker = "o" if len(history) <= _FEW_POINTS else ""
    keys = dict.fromkeys(key for entry in history for key in entry if key.endswith("_acc") and key != "clean_acc")
    handles, labels, lowest = [], [], 100.0

    def draw(key: str, label: str, **options: Any) -> None:
        nonlocal lowest
        values = [100.0 * float(entry.get(key, math.nan)) for entry in history]
        finite = [(epoch, value) for epoch, value in zip(epochs, values, strict=True) if math.isfinite(value)]
        if not finite:
            return
        lowest = min(lowest, *(value for _, value in finite))
        (line,) = axes.plot(epochs, values, marker=marker, **options)
        handles.append(line)
        labels.append(_short(label))
        if key in ("clean_acc", "acc"):
            above = key == "clean_acc"
            axes.annotate(
                f"{finite[-1][1]:.1f}",
                finite[-1],
                xytext=(9, 1 if above else -1),
                textcoords="offset points",
                va="bottom" if above else "top",
                fontsize=10.5,
                fontweight="bold",
                color=options["color"],
            )

    draw("clean_acc", "clean", color=_CLEAN, linewidth=2.4, markersize=5, zorder=3)
    for index, key in enumerate(keys):
        draw(
            key,
            key.removesuffix("_acc"),
            color=_ATTACKS[index % len(_ATTACKS)],
            linestyle=_LINES[index % len(_LINES)],
            linewidth=1.4,
            markersize=3.5,
            zorder=5,
        )
    # wide and below: the strongest attack, often the same line, stays visible on top
    draw("acc", "worst case", color=_WORST, linewidth=4.0, markersize=7, zorder=4)
    # a zoomed axis only where nothing is lost below it
    bottom = 0.0 if lowest < 55 else 10 * math.floor((lowest - 5) / 10)
    axes.set_ylim(bottom, 100 + 0.02 * (100 - bottom))
    if len(history) == 1:
        axes.set_xlim(epochs[0] - 0.5, epochs[0] + 0.5)
        axes.set_xticks(epochs, [f"{epochs[0]:g}"])
    else:
        axes.locator_params(axis="x", integer=True, nbins=10)
        axes.margins(x=0.06)
    axes.set_xlabel("epoch", fontsize=11, color=_INK)
    axes.set_ylabel("accuracy (%)", fontsize=11, color=_INK)
    _legend(figure, handles, labels)
    return figure


def is_drawable(examples: Examples) -> bool:
    """Return whether there are samples and they are images that :func:`plot_examples` can show."""
    shape = examples.x.shape
    return examples.x.numel() > 0 and (len(shape) == 3 or (len(shape) == 4 and shape[1] in (1, 3)))


def plot_examples(
    examples: Examples,
    eps: float,
    *,
    bounds: Sequence[float] | None = (0.0, 1.0),
    max_samples: int = 8,
) -> Figure:
    """Show samples in rows: clean, perturbation, adversarial; the label above is red and bold when wrong.

    The perturbation is enlarged until its largest entry (at most ``eps``) fills the colour range, by the factor in the
    title. With one channel red is brighter and blue is darker than the clean image; with three it is added to grey.

    Args:
        examples: Samples of shape (n, channels, height, width) or (n, height, width), 1 or 3 channels.
        eps: Radius of the threat model in pixel units.
        bounds: Smallest and largest valid pixel; None takes them from the samples.
        max_samples: Number of samples shown, from the first on.

    Raises:
        UsageError: If there is no sample, it is not an image of 1 or 3 channels, or matplotlib is missing.
    """
    x, x_adv = (images[:max_samples].detach().float().cpu() for images in (examples.x, examples.x_adv))
    if not is_drawable(examples):
        raise UsageError(
            f"examples of shape {tuple(examples.x.shape)} cannot be drawn: "
            "give at least one image of 1 or 3 channels, shape (n, channels, height, width)"
        )
    if x.dim() == 3:
        x, x_adv = x[:, None], x_adv[:, None]
    low, high = bounds if bounds is not None else (float(x.min()), float(x.max()))
    span = (high - low) or 1.0
    delta = (x_adv - x) / span
    clean, adversarial = ((images - low) / span for images in (x, x_adv))
    factor = _factor(float(delta.abs().max()), eps / span)

    count, columns = len(x), 3
    blocks = 1 if count <= 4 else 2
    rows = math.ceil(count / blocks)
    height = _CELL * min(2.0, x.shape[2] / x.shape[3])
    # every axes has its place in inches: images stay aligned whatever the labels say
    pitch_x, pitch_y, block_gap, top, edge = _CELL + 0.08, height + 0.3, 0.25, 0.25, 0.08
    figure_width = blocks * columns * pitch_x - 0.08 + (blocks - 1) * block_gap + 2 * edge
    figure_height = rows * pitch_y + top + edge
    figure = _new_figure(figure_width, figure_height, layout=None)
    for sample in range(count):
        block, row = divmod(sample, rows)
        left = edge + block * (columns * pitch_x + block_gap)
        bottom = figure_height - top - (row + 1) * pitch_y
        axes = [
            figure.add_axes(
                (
                    (left + column * pitch_x) / figure_width,
                    bottom / figure_height,
                    _CELL / figure_width,
                    height / figure_height,
                )
            )
            for column in range(columns)
        ]
        _show(axes[0], clean[sample])
        _show(axes[1], delta[sample] * factor, signed=True)
        _show(axes[2], adversarial[sample])
        _verdict(axes[0], examples.y[sample], examples.predicted[sample])
        _verdict(axes[2], examples.y[sample], examples.predicted_adv[sample])
        if row == 0:
            enlarged = f"perturbation ×{factor:g}"  # noqa: RUF001 - a multiplication
            for column, heading in enumerate(("clean", enlarged, "adversarial")):
                _heading(axes[column], heading)
    return figure


def plot_attacks(results: Mapping[str, EvaluationResult]) -> Figure:
    """Plot clean, per-attack and worst-case accuracy as bars with 95 % Wilson intervals, one colour per model.

    Args:
        results: Evaluations by name of the model.

    Raises:
        UsageError: If ``results`` is empty, or matplotlib is missing.
    """
    if not results:
        raise UsageError("results is empty: there is no evaluation to plot")
    names = attack_names(results.values())
    groups = ["clean", *names, "worst case"]
    slot = 0.8 / len(results)
    figure = _new_figure(min(14.0, max(7.0, 0.45 * len(groups) * len(results) + 1.0)), 4.2)
    axes = figure.add_subplot()
    _style(axes)
    handles = []
    inches = slot * figure.get_figwidth() / len(groups)
    for index, result in enumerate(results.values()):
        counts = [result.num_clean, *(_num_robust(result, name) for name in names), result.num_robust]
        positions = [group + (index - (len(results) - 1) / 2) * slot for group in range(len(groups))]
        bars = [(place, count) for place, count in zip(positions, counts, strict=True) if count is not None]
        heights = [100 * count / max(1, result.num_samples) for _, count in bars]
        ends = [wilson_interval(count, result.num_samples) for _, count in bars]
        errors = [
            [max(0.0, height - 100 * low) for height, (low, _) in zip(heights, ends, strict=True)],
            [max(0.0, 100 * high - height) for height, (_, high) in zip(heights, ends, strict=True)],
        ]
        one_color = _MODELS[index % len(_MODELS)]
        color = [one_color] * len(bars) if len(results) > 1 else [_CLEAN, *[_MODELS[0]] * len(names), _WORST]
        drawn = axes.bar(
            [place for place, _ in bars],
            heights,
            width=min(slot * 0.92, 0.5),
            color=color,
            yerr=errors,
            error_kw={"ecolor": _INK, "elinewidth": 1.1, "capsize": 3, "capthick": 1.1},
        )
        handles.append(drawn)
        if inches >= 0.3:
            for (place, _), height, (_, high) in zip(bars, heights, ends, strict=True):
                axes.annotate(
                    f"{height:.1f}",
                    (place, 100 * high),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                    color=_INK,
                )
    axes.axvline(0.5, color=_GRID, linewidth=1.0, zorder=0)
    axes.axvline(len(groups) - 1.5, color=_GRID, linewidth=1.0, zorder=0)
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    tilted = max(map(len, groups)) * 0.095 > figure.get_figwidth() / len(groups)
    axes.set_xticks(
        range(len(groups)),
        [_short(name) for name in groups],
        fontsize=11,
        color=_INK,
        parse_math=False,
        rotation=20 if tilted else 0,
        ha="right" if tilted else "center",
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("accuracy (%), 95 % interval", fontsize=11, color=_INK)
    if len(results) > 1:
        _legend(figure, handles, [_short(name, 2 * _LONGEST_NAME) for name in results])
    return figure


def _new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    try:
        import matplotlib  # noqa: F401 - a missing package is noticed here even when its parts are loaded
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"pictures need matplotlib ({error}): pip install 'robustdist[plots]'") from error
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes) -> None:
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.8, linestyle="-")
    axes.grid(visible=False, axis="x")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_MUTED)
    axes.tick_params(colors=_MUTED, labelcolor=_INK, labelsize=10)


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    widths = [0.6 + 0.085 * len(label) for label in labels]  # inches, about
    room = figure.get_figwidth()
    columns = len(labels) if sum(widths) <= room else int(room / max(widths))
    legend = figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=max(1, columns),
        frameon=False,
        fontsize=10.5,
        labelcolor=_INK,
        handlelength=2.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    name = " ".join(name.split()) or "unnamed"
    # shortened in the middle: names often differ at the end only
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[1 - longest // 2 :]}"


def _num_robust(result: EvaluationResult, name: str) -> int | None:
    return result.attacks[name].num_robust if name in result.attacks else None


def _factor(largest: float, eps: float) -> float:
    """Return the enlargement that brings the largest entry to half of the pixel range, rounded down."""
    reach = min(largest, eps) if eps > 0 and largest > 0 else max(largest, eps)
    if not 0 < reach < math.inf:
        return 1.0
    factor = 0.5 / reach * (1 + 1e-4)
    digits = 10.0 ** math.floor(math.log10(factor) - 1)
    return math.floor(factor / digits + 1e-9) * digits


def _show(axes: Axes, image: Tensor, *, signed: bool = False) -> None:
    image = torch.nan_to_num(image)
    options: dict[str, Any]
    if len(image) == 1:
        # the very ends of the diverging map are too dark to tell apart
        options = {"cmap": "RdBu_r", "vmin": -0.65, "vmax": 0.65} if signed else {"cmap": "gray", "vmin": 0, "vmax": 1}
        pixels = image[0]
    else:
        options = {}
        pixels = (image + 0.5 if signed else image).clamp(0, 1).permute(1, 2, 0)
    axes.imshow(pixels.numpy(), interpolation="nearest", **options)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(_GRID)


def _verdict(axes: Axes, truth: int, predicted: int) -> None:
    wrong = truth != predicted
    text = f"true {truth}, pred. {predicted}"
    axes.set_title(
        text,
        fontsize=min(9.0, 72 * _CELL / (0.62 * len(text))),
        color="#c00000" if wrong else _INK,
        fontweight="bold" if wrong else "normal",
        pad=4,
    )


def _heading(axes: Axes, text: str) -> None:
    # above the line of the verdicts, at one height in every column
    axes.annotate(
        text,
        (0.5, 1.0),
        xytext=(0, 20),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        fontsize=9,
        fontweight="bold",
        color=_INK,
    )
