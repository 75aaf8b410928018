"""Pruning as tables and a picture: a plan, what was left, the way there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from robustdist.report.tables import plain_table

__all__ = ["plan_tables", "wide_console"]

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
        "widths may come out differently where one threshold goes for all groups",
    )
    groups.add_column("group", overflow="fold")
    groups.add_column("kind")
    groups.add_column("units", justify="right", no_wrap=True)
    groups.add_column("shrinks with it", overflow="fold")
    groups.add_column("stays whole by", overflow="fold")
    for group in plan["groups"]:
        width = f"{group['size']} -> {group['kept']}" if group["kept"] < group["size"] else str(group["size"])
        groups.add_row(*map(Text, (group["name"], group["kind"], width, _members(group["members"]), group["rule"])))
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
