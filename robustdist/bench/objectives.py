"""``robustdist bench objectives``: what the training objectives reach with one small net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from robustdist.attacks import LinearRamp
from robustdist.bench import small_training
from robustdist.bench.machine import describe_machine
from robustdist.bench.output import check_out, finished_runs, make_console, write_json
from robustdist.bench.small_training import BATCH_SIZE, METHODS, SETTINGS, Setting
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["bench_objectives"]

_ACCURACIES = {"clean_acc": "clean", "pgd20_acc": "PGD-20", "margin_acc": "margin"}


def bench_objectives(
    data: Literal["mnist5k", "fashion_mnist", "digits"] = "mnist5k",
    objectives: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    epochs: int | None = None,
    lr: float = 5e-3,
    ramp: float = 0.3,
    num_test: int = 500,
    threads: int = 1,
) -> dict[str, Any]:
    """Train one small net per objective and seed, and measure its robust accuracy.

    The net (166,406 parameters) is trained through the Trainer and AdversarialTraining in batches of 100, with Adam and
    a one-cycle rate; radius and attack step grow at first. mnist5k: 4000 training images, eps 0.3, 15 epochs, 7 attack
    steps of 2.5 eps / 7; fashion_mnist: 55,000, eps 0.1, 1 epoch, 5 steps; digits: 1397 images of 8x8, eps 0.1, 10
    epochs, 5 steps. FreeAT takes four times as many, cheaper updates. A CatastrophicOverfittingGuard looks on, 15 times
    per training, at 256 training images, and only warns; its time is part of the seconds. Judged on test images:
    "pgd20" is PGD with 20 steps of eps / 8 on cross-entropy, "margin" 50 such steps on the margin, best of 2 starts. A
    seed sets the initial weights, the order of the batches and the random starts; the split of the data is always the
    same.

    Args:
        data: Data set.
        objectives: Rows, by key; default all: standard, fgsm_rs, n_fgsm, n_fgsm_free, grad_align, pgd2, pgd_at, trades,
            mart, awp, dat, free_at, friendly_at, fast_bat, fast_bat_paper.
        seeds: One training each; default 0, 1 and 2.
        out: JSON file for the figures, written after every training; its folder must exist. If it holds figures of the
            same settings, what is there is not measured again.
        epochs: Length of training, if not the usual one of the data set.
        lr: Peak of the learning rate.
        ramp: Share of the steps over which radius and attack step grow; 0 for none.
        num_test: Test images, the first ones.
        threads: Threads that torch may use.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``runs`` (one per objective and seed) and ``rows`` (over the seeds),
        as in the file.

    Raises:
        UsageError: If an argument is out of range, or ``out`` holds something else, before anything is measured.
    """
    setting = _checked_setting(data, epochs, lr, ramp)
    keys = _checked_keys(objectives)
    chosen_seeds = list(dict.fromkeys((0, 1, 2) if seeds is None else seeds))
    if not chosen_seeds:
        raise UsageError("seeds is empty: give at least one, for example 0")
    for option, value in (("num_test", num_test), ("threads", threads)):
        check_count(value, option)
    settings = {
        "data": data,
        "eps": setting.eps,
        "steps": setting.steps,
        "epochs": setting.epochs,
        "num_test": num_test,
        "batch_size": BATCH_SIZE,
        "lr": lr,
        "ramp": ramp,
        "threads": threads,
    }
    path = check_out(out)
    runs = finished_runs(path, "objectives", settings)
    loaded = setting.data(BATCH_SIZE)
    loaded.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in chosen_seeds:
        for key in keys:
            method = METHODS[key]
            wanted = {"objective": key, "seed": seed, "training": small_training.describe(method, setting)}
            if not any(run.items() >= wanted.items() for run in runs):
                with small_training.quiet(threads, seed):
                    measured = small_training.run(method, setting, loaded, seed, num_test)
                runs = [run for run in runs if (run["objective"], run["seed"]) != (key, seed)]
                runs.append({**wanted, **measured})
                console.print(Text(f"{method.name}, seed {seed}: {_in_words(measured)}"))
            result = {
                "benchmark": "objectives",
                "settings": settings,
                "machine": describe_machine(torch.device("cpu")),
                "runs": runs,
                "rows": _rows(runs),
            }
            if path is not None:
                write_json(path, result)
    _print(console, result, keys)
    return result


def _checked_setting(data: str, epochs: int | None, lr: float, ramp: float) -> Setting:
    if data not in SETTINGS:
        raise UsageError(f"data={data!r} is unknown: choose one of {', '.join(SETTINGS)}")
    if not 0 < lr < float("inf"):
        raise UsageError(f"lr={lr} must be positive")
    if ramp:
        LinearRamp(ramp)  # refuses what is out of range
    setting = replace(SETTINGS[data], lr=lr, ramp=ramp)
    return setting if epochs is None else replace(setting, epochs=check_count(epochs, "epochs"))


def _checked_keys(objectives: Sequence[str] | None) -> list[str]:
    keys = list(dict.fromkeys(METHODS if objectives is None else objectives))
    unknown = [key for key in keys if key not in METHODS]
    if unknown or not keys:
        raise UsageError(f"objectives={unknown} are unknown: choose some of {', '.join(METHODS)}")
    return keys


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for key, method in METHODS.items():
        own = [run for run in runs if run["objective"] == key]
        if not own:
            continue
        row: dict[str, Any] = {"objective": key, "name": method.name, "seeds": sorted(run["seed"] for run in own)}
        for name in (*_ACCURACIES, "robust_acc", "cpu_seconds"):
            values = [run[name] for run in own]
            row[name] = {"mean": fmean(values), "min": min(values), "max": max(values)}
        reports = [run["guard"]["collapsed_in_epoch"] for run in own if run["guard"] is not None]
        row["guard_epochs"] = [epoch for epoch in reports if epoch is not None]
        rows.append(row)
    return rows


def _in_words(run: dict[str, Any]) -> str:
    accuracies = ", ".join(f"{name} {run[key]:.3f}" for key, name in _ACCURACIES.items())
    return f"{accuracies}, {run['cpu_seconds']:.0f} s"


def _print(console: Console, result: dict[str, Any], keys: Sequence[str]) -> None:
    settings = result["settings"]
    title = f"{settings['data']}, eps {settings['eps']:g}: mean and (min-max) over seeds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("objective")
    for heading in (*_ACCURACIES.values(), "seeds", "guard: collapse\nin epoch", "cpu s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        if row["objective"] not in keys:
            continue
        spreads = [row[name] for name in _ACCURACIES]
        cells = [f"{spread['mean']:.3f} ({spread['min']:.3f}-{spread['max']:.3f})" for spread in spreads]
        epochs = ", ".join(map(str, row["guard_epochs"])) or "-"
        cells += [str(len(row["seeds"])), epochs, f"{row['cpu_seconds']['mean']:.0f}"]
        table.add_row(row["name"], *(Text(cell) for cell in cells))
    console.print(table)
    machine = result["machine"]
    console.print(
        Text(
            f"{settings['epochs']} epochs, {settings['num_test']} test images, {machine['processor']}, "
            f"torch {machine['torch']}, threads {settings['threads']}"
        )
    )
