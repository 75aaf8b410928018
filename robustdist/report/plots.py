"""Evaluation results as pictures: accuracy over epochs, by attack, along a curve, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from robustdist.errors import UsageError
from robustdist.report.drawing import ATTACKS, CLEAN, GRID, INK, LINES, MODELS, WORST, legend, new_figure, short, style
from robustdist.report.result import CurvePoint, EvaluationResult, Step, wilson_interval
from robustdist.report.text import attack_names, eps_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_attacks", "plot_curve", "plot_curves", "plot_waterfall"]

_LONGEST_NAME = 18
_FEW_POINTS = 25


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
    figure = new_figure(5.6, 3.8)
    axes = figure.add_subplot()
    style(axes)
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
        labels.append(short(label))
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

    draw("clean_acc", "clean", color=CLEAN, linewidth=2.4, markersize=5, zorder=3)
    for index, key in enumerate(keys):
        draw(
            key,
            key.removesuffix("_acc"),
            color=ATTACKS[index % len(ATTACKS)],
            linestyle=LINES[index % len(LINES)],
            linewidth=1.4,
            markersize=3.5,
            zorder=5,
        )
    # wide and below: the strongest attack, often the same line, stays visible on top
    draw("acc", "worst case", color=WORST, linewidth=4.0, markersize=7, zorder=4)
    # a zoomed axis only where nothing is lost below it
    bottom = 0.0 if lowest < 55 else 10 * math.floor((lowest - 5) / 10)
    axes.set_ylim(bottom, 100 + 0.02 * (100 - bottom))
    if len(history) == 1:
        axes.set_xlim(epochs[0] - 0.5, epochs[0] + 0.5)
        axes.set_xticks(epochs, [f"{epochs[0]:g}"])
    else:
        axes.locator_params(axis="x", integer=True, nbins=10)
        axes.margins(x=0.06)
    axes.set_xlabel("epoch", fontsize=11, color=INK)
    axes.set_ylabel("accuracy (%)", fontsize=11, color=INK)
    legend(figure, handles, labels)
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
    figure = new_figure(min(14.0, max(5.2, 0.45 * len(groups) * len(results) + 1.0)), 3.8)
    axes = figure.add_subplot()
    style(axes)
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
        one_color = MODELS[index % len(MODELS)]
        color = [one_color] * len(bars) if len(results) > 1 else [CLEAN, *[MODELS[0]] * len(names), WORST]
        drawn = axes.bar(
            [place for place, _ in bars],
            heights,
            width=min(slot * 0.92, 0.5),
            color=color,
            yerr=errors,
            error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 3, "capthick": 1.1},
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
                    color=INK,
                )
    axes.axvline(0.5, color=GRID, linewidth=1.0, zorder=0)
    axes.axvline(len(groups) - 1.5, color=GRID, linewidth=1.0, zorder=0)
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    tilted = max(map(len, groups)) * 0.095 > figure.get_figwidth() / len(groups)
    axes.set_xticks(
        range(len(groups)),
        [short(name) for name in groups],
        fontsize=11,
        color=INK,
        parse_math=False,
        rotation=20 if tilted else 0,
        ha="right" if tilted else "center",
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("accuracy (%), 95 % interval", fontsize=11, color=INK)
    if len(results) > 1:
        legend(figure, handles, [short(name, 2 * _LONGEST_NAME) for name in results])
    return figure


def plot_curve(points: Sequence[CurvePoint], name: str, mark: float | None = None) -> Figure:
    """Plot accuracy on the examined subset against one setting of the attack, with the 95 % Wilson interval as a band.

    Args:
        points: In ascending order of their values.
        name: "eps", "steps" or "restarts"; the latter two on a logarithmic axis.
        mark: Value of the evaluation itself, marked by a line.

    Raises:
        UsageError: If ``points`` is empty, or matplotlib is missing.
    """
    if not points:
        raise UsageError("points is empty: there is no curve to plot")
    figure = new_figure(5.2, 3.1)
    axes = figure.add_subplot()
    style(axes)
    values = [point.value for point in points]
    heights = [100 * point.num_right / max(1, point.num_samples) for point in points]
    ends = [wilson_interval(point.num_right, point.num_samples) for point in points]
    axes.fill_between(values, [100 * low for low, _ in ends], [100 * high for _, high in ends], color=WORST, alpha=0.18)
    axes.plot(values, heights, color=WORST, linewidth=2.4, marker="o", markersize=5)
    for place in _apart(values, logarithmic=name != "eps"):
        marked = values[place] == mark
        axes.annotate(
            f"{heights[place]:.1f}",
            (values[place], 100 * ends[place][1]),
            xytext=(4 if marked else 0, 3),
            textcoords="offset points",
            ha="left" if marked else "center",
            fontsize=9,
            color=INK,
        )
    if name == "eps":
        if mark is not None:
            axes.axvline(mark, color=INK, linewidth=1.0, linestyle=LINES[1], zorder=1)
            axes.annotate(
                f"evaluated at {eps_text(mark)}",
                (mark, 116),
                xytext=(4, -2),
                textcoords="offset points",
                va="top",
                fontsize=9,
                color=INK,
            )
        axes.set_xlabel("radius", fontsize=11, color=INK)
    else:
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
        axes.set_xlabel(f"{name} of the attack", fontsize=11, color=INK)
    axes.set_ylim(0, 116)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("accuracy (%)", fontsize=11, color=INK)
    return figure


def _apart(values: Sequence[float], *, logarithmic: bool) -> list[int]:
    """Return the places of the points whose labels do not run into the label before."""
    across = [math.log(value) for value in values] if logarithmic else list(values)
    room = 0.1 * (across[-1] - across[0])
    chosen: list[int] = []
    for place, at in enumerate(across):
        if not chosen or at - across[chosen[-1]] >= room:
            chosen.append(place)
    return chosen


def plot_waterfall(steps: Sequence[Step], num_samples: int) -> Figure:
    """Plot how many samples are still right after each attack and stage, from clean downwards, with Wilson intervals.

    Args:
        steps: In the order in which they were taken.
        num_samples: All samples.

    Raises:
        UsageError: If ``steps`` is empty, or matplotlib is missing.
    """
    if not steps:
        raise UsageError("steps is empty: there is no waterfall to plot")
    figure = new_figure(5.2, 0.7 + 0.36 * len(steps))
    axes = figure.add_subplot()
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8)
    places = range(len(steps))
    heights = [100 * step.num_robust / max(1, num_samples) for step in steps]
    before = [heights[0], *heights[:-1]]
    colors = [CLEAN, *[MODELS[0]] * (len(steps) - 2), WORST] if len(steps) > 1 else [CLEAN]
    # what fell at this step, pale, beside what is left
    axes.barh(places, before, color=GRID, height=0.62)
    axes.barh(places, heights, color=colors, height=0.62)
    for place, height, step in zip(places, heights, steps, strict=True):
        low, high = wilson_interval(step.num_robust, num_samples)
        axes.plot([100 * low, 100 * high], [place, place], color=INK, linewidth=1.1)
        axes.annotate(f"{height:.1f}", (101.5, place), va="center", fontsize=9.5, color=INK)
    axes.set_yticks(places, [short(step.name, 2 * _LONGEST_NAME) for step in steps], parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_xlim(0, 110)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("still right (%), 95 % interval", fontsize=11, color=INK)
    return figure


def _num_robust(result: EvaluationResult, name: str) -> int | None:
    return result.attacks[name].num_robust if name in result.attacks else None
