"""Benchmarks that train every row once per seed: which rows and seeds, and figures over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from robustdist.errors import UsageError

__all__ = ["chosen_keys", "chosen_seeds", "rows_over_seeds", "shown", "spread"]


def chosen_keys(keys: Sequence[str] | None, known: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Return the rows to measure, each once.

    Raises:
        UsageError: If one is unknown, or there are none.
    """
    chosen = list(dict.fromkeys(default if keys is None else keys))
    unknown = [key for key in chosen if key not in known]
    if unknown or not chosen:
        raise UsageError(f"methods={unknown} are unknown: choose some of {', '.join(known)}")
    return chosen


def chosen_seeds(seeds: Sequence[int] | None) -> list[int]:
    """Return the seeds, each once; 0, 1 and 2 by default.

    Raises:
        UsageError: If there are none.
    """
    chosen = list(dict.fromkeys((0, 1, 2) if seeds is None else seeds))
    if not chosen:
        raise UsageError("seeds is empty: give at least one, for example 0")
    return chosen


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, smallest and largest."""
    return {"mean": fmean(values), "min": min(values), "max": max(values)}


def rows_over_seeds(
    runs: Sequence[Mapping[str, Any]], names: Mapping[str, str], figures: Sequence[str]
) -> list[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """Return a row per method that has runs, and these runs.

    Args:
        runs: Each with ``method``, ``seed`` and the figures.
        names: Key of a method -> its name in tables, in the order of rows.
        figures: Numbers of a run of which the row gets mean, smallest and largest.
    """
    rows = []
    for key, name in names.items():
        own = [run for run in runs if run["method"] == key]
        if own:
            row: dict[str, Any] = {"method": key, "name": name, "seeds": sorted(run["seed"] for run in own)}
            row |= {figure: spread([run[figure] for run in own]) for figure in figures}
            rows.append((row, own))
    return rows


def shown(values: Mapping[str, float]) -> str:
    """Return mean and range for a table."""
    return f"{values['mean']:.3f} ({values['min']:.3f}-{values['max']:.3f})"
