"""``robustdist bench prune_accuracy``: what half of the channels cost a robust network, by how it is tuned after."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from robustdist._lightning import Callback, LightningModule, Trainer
from robustdist.attacks import PGD
from robustdist.bench.machine import describe_machine
from robustdist.bench.models import ResidualNet
from robustdist.bench.output import check_out, finished_runs, make_console, write_json
from robustdist.bench.seeds import chosen_keys, chosen_seeds, rows_over_seeds, shown
from robustdist.bench.small_training import SmallClassifier, judge, quiet
from robustdist.callbacks import AdversarialTraining, StructuredPruning
from robustdist.data import DigitsDataModule
from robustdist.types import check_count

__all__ = ["bench_prune_accuracy"]

_EPS = 0.15
_TRAIN_STEPS = 5
_LR = 3e-3
#: Share of the fine-tuning after which the channels go; the gradients until then are the scores.
_START = 0.05


@dataclass(frozen=True)
class _Method:
    """One row: how the dense, adversarially trained network is made small."""

    name: str
    robust: bool = True
    options: Mapping[str, Any] | None = field(default_factory=dict)


_METHODS = {
    "dense": _Method("dense", options=None),
    "taylor": _Method("half: Taylor under attack, robust tuning", options={"method": "taylor"}),
    "magnitude": _Method("half: magnitude, robust tuning", options={"method": "magnitude"}),
    "random": _Method("half: random, robust tuning", options={"method": "random"}),
    "distilled": _Method("half: Taylor under attack, robust tuning, teacher", options={"distill": 0.5}),
    "clean": _Method("half: Taylor, clean tuning", robust=False, options={"method": "taylor"}),
}


def bench_prune_accuracy(
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    width: float = 0.5,
    epochs: int = 12,
    tuning_epochs: int = 10,
    threads: int = 1,
) -> dict[str, Any]:
    """Train a small residual network adversarially on digits, remove channels, and tune it on.

    linf radius 0.15, PGD-5 in training (batches of 64, Adam, a one-cycle rate that peaks at 3e-3), PGD-20 on the 200
    test images. Every row begins with the same dense network of its seed; the channels go after 5 % of the tuning, in
    the same proportion everywhere. The row dense is that network, without tuning.

    Args:
        methods: Rows, by key: dense, taylor, magnitude, random, distilled, clean; default all.
        seeds: One training each; default 0, 1 and 2.
        out: JSON file for the figures, written after every training; its folder must exist. If it holds figures of the
            same settings, what is there is not measured again.
        width: Share of the channels that stays.
        epochs: Length of the dense training.
        tuning_epochs: Length of the tuning.
        threads: Threads that torch may use.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``runs`` and ``rows`` (over the seeds), as in the file.

    Raises:
        UsageError: If an argument is out of range, or ``out`` holds something else.
    """
    tried = chosen_seeds(seeds)
    keys = chosen_keys(methods, _METHODS, list(_METHODS))
    counts = {"epochs": epochs, "tuning_epochs": tuning_epochs, "threads": threads}
    for option, value in counts.items():
        check_count(value, option)
    settings = {**counts, "width": width, "eps": _EPS, "train_steps": _TRAIN_STEPS, "lr": _LR, "start": _START}
    path = check_out(out)
    runs = finished_runs(path, "prune_accuracy", settings)
    data = DigitsDataModule(batch_size=64)
    data.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in tried:
        todo = [key for key in keys if not any((run["method"], run["seed"]) == (key, seed) for run in runs)]
        with quiet(threads, seed):
            dense = _dense(data, epochs, seed) if todo else None
            for key in todo:
                assert dense is not None
                torch.manual_seed(seed)
                runs.append({"method": key, "seed": seed, **_run(_METHODS[key], dense, data, settings, seed)})
                console.print(Text(f"{_METHODS[key].name}, seed {seed}: {_in_words(runs[-1])}"))
        result = {
            "benchmark": "prune_accuracy",
            "settings": settings,
            "machine": describe_machine(torch.device("cpu")),
            "runs": runs,
            "rows": _rows(runs),
        }
        if path is not None:
            write_json(path, result)
    _print(console, result)
    return result


def _dense(data: DigitsDataModule, epochs: int, seed: int) -> SmallClassifier:
    module = SmallClassifier(ResidualNet((32, 32, 64), in_channels=1, num_classes=data.num_classes), _LR)
    _trainer([_attacked(seed)], epochs).fit(module, train_dataloaders=data.train_dataloader())
    return module


def _run(
    method: _Method, dense: LightningModule, data: DigitsDataModule, settings: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    module = copy.deepcopy(dense)
    seconds = 0.0
    if method.options is not None:
        pruning = StructuredPruning(
            {"width": settings["width"]},
            schedule={"kind": "one_shot", "start": _START},
            seed=seed,
            report=False,
            **method.options,
        )
        callbacks: list[Callback] = [_attacked(seed), pruning] if method.robust else [pruning]
        start = time.process_time()
        trainer = _trainer(callbacks, settings["tuning_epochs"])
        trainer.fit(module, train_dataloaders=data.train_dataloader())
        seconds = time.process_time() - start
    attack = PGD(eps=_EPS, steps=20, step_size=_EPS / 8)
    found = judge(module, {"pgd20": attack}, data, len(data.parts.test.tensors[0]))
    return {**found, "params": _params(module), "cpu_seconds": seconds}


def _attacked(seed: int) -> AdversarialTraining:
    return AdversarialTraining(attack=PGD(eps=_EPS, steps=_TRAIN_STEPS, seed=seed))


def _trainer(callbacks: list[Callback], epochs: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _params(module: nn.Module) -> int:
    parameters: list[Tensor] = list(module.parameters())
    return sum(parameter.numel() for parameter in parameters)


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    figures = ("clean_acc", "pgd20_acc", "params", "cpu_seconds")
    return [row for row, _ in rows_over_seeds(runs, {key: method.name for key, method in _METHODS.items()}, figures)]


def _in_words(run: Mapping[str, Any]) -> str:
    return f"clean {run['clean_acc']:.3f}, PGD-20 {run['pgd20_acc']:.3f}, {run['params']:,} parameters"


def _print(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title="digits, linf 0.15, mean over seeds (min-max)", title_justify="left", box=None, pad_edge=False)
    table.add_column("network")
    for heading in ("parameters", "clean", "PGD-20", "cpu s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['params']['mean']:,.0f}",
            shown(row["clean_acc"]),
            shown(row["pgd20_acc"]),
            f"{row['cpu_seconds']['mean']:.0f}",
        )
    console.print(table)
