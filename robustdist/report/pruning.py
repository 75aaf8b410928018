"""Pruning as tables and a picture: a plan, what was left, the way there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from robustdist.report.drawing import ATTACKS, CLEAN, INK, WORST, legend, new_figure, short, style
from robustdist.report.tables import plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plan_tables", "plot_schedule", "pruning_tables", "wide_console"]

_WIDTH_WITHOUT_TERMINAL = 120
_MEMBERS = 4


def wide_console() -> Console:
    """Return a console on the standard output, wide enough for a table when that is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)


def plan_tables(plan: Mapping[str, Any]) -> list[RenderableType]:
    """Return a plan, in the form of ``PruningPlan.to_dict``: groups, what is refused, sizes before and after."""
    target = ", ".join(f"{name}: {value}" for name, value in plan["target"].items())
    groups = plain_table(
        f"What StructuredPruning(target={{{target}}}) finds in {plan['model']}",
        f"units ranked by {plan['scores']} of the weights before training: the fit ranks them by its own method, so "
        "other layers may go, and widths may come out differently where one threshold goes for all groups",
    )
    groups.add_column("group", overflow="fold")
    groups.add_column("kind")
    groups.add_column("units", justify="right", no_wrap=True)
    groups.add_column("shrinks or goes with it", overflow="fold")
    groups.add_column("stays whole by", overflow="fold")
    for group in plan["groups"]:
        width = f"{group['size']} -> {group['kept']}" if group["kept"] < group["size"] else str(group["size"])
        shrinks = ", ".join(group["layers"]) or _members(group["members"])
        groups.add_row(*map(Text, (group["name"], group["kind"], width, shrinks, group["rule"])))
    parts: list[RenderableType] = [groups]
    if plan["refused"]:
        refused = plain_table("Stays whole because it cannot be pruned", "")
        refused.add_column("layer", overflow="fold")
        refused.add_column("why", overflow="fold")
        for path, reason in plan["refused"].items():
            refused.add_row(Text(path or plan["model"]), Text(reason))
        parts.append(refused)
    sizes = plain_table("Predicted", "multiply-accumulates of one sample")
    for name in ("", "dense", "pruned", "left"):
        sizes.add_column(name, justify="right" if name else "left")
    for key, name in (("params", "parameters"), ("macs", "MACs")):
        before, after = plan["dense"][key], plan["small"][key]
        sizes.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.1%}" if before else "")
    return [*parts, sizes]


def _members(names: Iterable[str]) -> str:
    """The first members; biases and statistics go with their weights and need no naming."""
    all_names = list(names)
    weights = [name for name in all_names if ".weight[" in name] or all_names
    more = f" and {len(weights) - _MEMBERS} more" if len(weights) > _MEMBERS else ""
    return ", ".join(weights[:_MEMBERS]) + more


def pruning_tables(content: Mapping[str, Any]) -> list[RenderableType]:
    """Return what a pruning brought: widths of layers, sizes and times, accuracies.

    Args:
        content: ``model``, ``method``, ``target``, ``layers``, ``depths``, ``sizes``, ``not_measured`` and ``metrics``,
            as they go into ``pruning.json``.
    """
    target = ", ".join(f"{name}: {value}" for name, value in content["target"].items())
    gone = [path for depth in content["depths"] for path in depth["gone"]]
    layers = plain_table(
        f"{content['model']} pruned by {content['method']} to {{{target}}}",
        f"layers that are gone: {', '.join(gone)}" if gone else "",
    )
    layers.add_column("layer", overflow="fold")
    for name in ("outputs", "inputs"):
        layers.add_column(name, justify="right", no_wrap=True)
    for layer in content["layers"]:
        layers.add_row(Text(layer["name"]), *(_change(layer[side]) for side in ("outputs", "inputs")))
    for depth in content["depths"]:
        layers.add_row(Text(depth["name"] or "layers"), f"{depth['before']} -> {depth['after']} layers", "")
    totals = plain_table("", _notes(content))
    for name in ("", "dense", "pruned", "after tuning", "ratio"):
        totals.add_column(name, justify="right" if name else "left", no_wrap=True)
    sizes = content["sizes"]
    for key, name in (("params", "parameters"), ("macs", "MACs per sample"), ("file_bytes", "bytes of state dict")):
        if sizes is not None:
            before, after = sizes["dense"][key], sizes["small"][key]
            share = f"{after / before:.3f}" if before else ""
            totals.add_row(name, f"{before:,}", f"{after:,}", "", share)
    for rows in sizes["dense"]["cpu_ms"] if sizes else ():
        before, after = sizes["dense"]["cpu_ms"][rows], sizes["small"]["cpu_ms"][rows]
        faster = f"{before / after:.2f}x faster" if after else ""
        totals.add_row(f"CPU ms, batch {rows}", f"{before:.2f}", f"{after:.2f}", "", faster)
    for name, phases in content["metrics"].items():
        cells = [phases.get(phase) for phase in ("dense", "after_removal", "after_tuning")]
        totals.add_row(Text(name), *("-" if cell is None else f"{cell['value']:.4f}" for cell in cells), "")
    return [layers, totals]


def _change(sizes: tuple[int, int] | None) -> str:
    if sizes is None:
        return ""
    return f"{sizes[0]} -> {sizes[1]}" if sizes[0] != sizes[1] else str(sizes[0])


def _notes(content: Mapping[str, Any]) -> str:
    notes = []
    if content["not_measured"] is not None:
        notes.append(f"sizes are missing: {content['not_measured']}")
    elif content["sizes"]["dense"]["cpu_ms"]:
        notes.append("CPU time of this process in one thread, medians, both models in turn")
    steps: Mapping[str, Any] = next(iter(content["metrics"].values()), {})
    if steps:
        named = {"dense": "dense", "after_removal": "pruned", "after_tuning": "after tuning"}
        notes.append(
            "validated after " + ", ".join(f"{entry['step']} steps ({named[p]})" for p, entry in steps.items())
        )
    return "\n".join(notes)


def plot_schedule(content: Mapping[str, Any]) -> Figure:
    """Plot what is left over the steps, and the accuracies beside it.

    Args:
        content: ``schedule`` (step, amount, params, macs) and ``evaluations`` (step, phase, metrics).

    Raises:
        UsageError: If matplotlib is missing.
    """
    evaluations = content["evaluations"]
    figure = new_figure(6.4, 5.2 if evaluations else 3.0)
    panels = figure.subplots(2 if evaluations else 1, 1, sharex=True, squeeze=False)[:, 0]
    last = max([entry["step"] for entry in [*content["schedule"], *evaluations]], default=0)
    left, handles, labels = panels[0], [], []
    style(left)
    for key, label, color in (
        ("amount", "units", CLEAN),
        ("params", "parameters", WORST),
        ("macs", "MACs", ATTACKS[0]),
    ):
        points = [(0, 1.0)]
        for entry in content["schedule"]:
            dense = content["sizes"]["dense"].get(key) if content["sizes"] and key != "amount" else None
            value = 1 - entry[key] if key == "amount" else entry[key] / dense if dense else None
            if value is not None:
                points.append((entry["step"], value))
        points.append((last, points[-1][1]))
        if len(points) > 2:
            (line,) = left.step(*zip(*points, strict=True), where="post", color=color, linewidth=2)
            handles.append(line)
            labels.append(f"{label} left")
    left.set_ylim(0, 1.05)
    left.set_ylabel("share", color=INK)
    for index, name in enumerate(dict.fromkeys(name for entry in evaluations for name in entry["metrics"])):
        points = [(entry["step"], entry["metrics"][name]) for entry in evaluations if name in entry["metrics"]]
        color = (INK, *ATTACKS[1:3], *ATTACKS[4:])[index % 4]
        (line,) = panels[1].plot(*zip(*points, strict=True), marker="o", markersize=4, color=color)
        handles.append(line)
        labels.append(short(name))
    if evaluations:
        style(panels[1])
        panels[1].set_ylabel("accuracy", color=INK)
    panels[-1].set_xlabel("optimiser steps", color=INK)
    if handles:
        legend(figure, handles, labels)
    return figure
