"""``robustdist bench comm_accuracy``: what compressed gradients cost in accuracy, against the bytes they send."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from robustdist._lightning import Callback, DDPStrategy, LightningModule, Trainer
from robustdist.attacks import LinearRamp
from robustdist.bench import small_training
from robustdist.bench.machine import describe_machine
from robustdist.bench.models import small_conv_net
from robustdist.bench.output import check_out, finished_runs, make_console, write_json
from robustdist.bench.small_training import BATCH_SIZE, METHODS, SETTINGS, OptimizerName, Setting, SmallClassifier
from robustdist.callbacks import AdversarialTraining
from robustdist.comm import QSGD, Int8, Sign, TopK
from robustdist.comm.cost import dense_bytes
from robustdist.comm.mqgrad import MQGrad
from robustdist.data import ImageDataModule
from robustdist.errors import UsageError
from robustdist.strategies import CompressedDDPStrategy
from robustdist.types import check_count

__all__ = ["bench_comm_accuracy"]

_RATES: dict[OptimizerName, float] = {"adam": 5e-3, "sgd": 0.1}
_ACCURACIES = {"clean_acc": "clean", "pgd20_acc": "PGD-20"}


@dataclass(frozen=True)
class _Row:
    name: str
    options: Callable[[], dict[str, Any]] | None  # None: Lightning's DDP

    def label(self, warmup: float) -> str:
        return self.name if self.options is None or not warmup else f"{self.name}, after {100 * warmup:g} % of float32"


_ROWS = {
    "ddp": _Row("DDP, float32", None),
    "int8": _Row("Int8", lambda: {"compressor": Int8()}),
    "qsgd4": _Row("QSGD, 4 bits", lambda: {"compressor": QSGD(bits=4)}),
    "sign": _Row("Sign", lambda: {"compressor": Sign(), "collective": "chunked"}),
    "topk": _Row("TopK, 1 %", lambda: {"compressor": TopK(0.01)}),
    "sign_no_ef": _Row(
        "Sign, no error feedback",
        lambda: {"compressor": Sign(), "collective": "chunked", "error_feedback": False},
    ),
    "topk_no_ef": _Row("TopK, 1 %, no error feedback", lambda: {"compressor": TopK(0.01), "error_feedback": False}),
    "qsgd8": _Row("QSGD, 8 bits", lambda: {"compressor": QSGD(bits=8)}),
    "mqgrad": _Row("QSGD, bits by MQGrad", lambda: {"compressor": QSGD(), "bits": MQGrad()}),
}


def bench_comm_accuracy(
    data: Literal["fashion_mnist", "mnist5k", "digits"] = "fashion_mnist",
    rows: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    plot: str | None = None,
    epochs: int = 2,
    num_test: int = 2000,
    world_size: int = 2,
    optimizer: OptimizerName = "adam",
    lr: float | None = None,
    warmup: float = 0.0,
) -> dict[str, Any]:
    """Train one small net adversarially on several processes per codec and seed; accuracy against bytes.

    The net (166,406 parameters for 28x28 images) is trained by PGD-AT, batches of 50 per process, with a one-cycle
    rate; the radius grows over the first 30 % of the steps. It is judged without attack and under PGD with 20 steps of
    eps / 8. Bytes are payload bytes that one process sends. A seed sets the initial weights, the order of the batches
    and the random starts. The processes share this machine and its network: seconds say little, see ``bench comm``.

    Args:
        data: Data set: fashion_mnist (55,000 images, eps 0.1, 5 steps), mnist5k (eps 0.3, 7 steps), digits.
        rows: Rows, by key; default all: ddp, int8, qsgd4, sign, topk, sign_no_ef, topk_no_ef, qsgd8, mqgrad.
        seeds: One training each; default 0, 1 and 2.
        out: JSON file for the figures, written after every training; what it holds is not measured again.
        plot: PNG file for accuracy against bytes.
        epochs: Epochs over the data.
        num_test: Test images, the first ones.
        world_size: Processes.
        optimizer: "adam", or "sgd" with momentum 0.9.
        lr: Peak of its rate; default 5e-3 for Adam, 0.1 for SGD.
        warmup: Share of the steps, in [0, 1), that average float32 before a codec sets in; their bytes count too.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``runs`` and ``rows``, as in the file.

    Raises:
        UsageError: If an argument is out of range, or ``out`` holds something else, before anything is measured.
    """
    if data not in SETTINGS:
        raise UsageError(f"data={data!r} is unknown: choose one of {', '.join(SETTINGS)}")
    keys = list(dict.fromkeys(_ROWS if rows is None else rows))
    unknown = [key for key in keys if key not in _ROWS]
    if unknown or not keys:
        raise UsageError(f"rows={unknown} are unknown: choose some of {', '.join(_ROWS)}")
    for option, value in (("epochs", epochs), ("num_test", num_test), ("world_size", world_size)):
        check_count(value, option)
    if optimizer not in _RATES:
        raise UsageError(f"optimizer={optimizer!r} is unknown: choose one of {', '.join(_RATES)}")
    lr = _RATES[optimizer] if lr is None else lr
    if not 0 < lr < float("inf"):
        raise UsageError(f"lr={lr} must be a finite number above 0")
    if not 0 <= warmup < 1:
        raise UsageError(
            f"warmup={warmup} must be a share of the steps, at least 0 and below 1: a fifth of them is 0.2"
        )
    settings: dict[str, Any] = {"data": data, "epochs": epochs, "num_test": num_test, "world_size": world_size}
    settings |= {"optimizer": optimizer, "lr": lr, "warmup": warmup}
    path, plot_path = check_out(out), check_out(plot)
    runs = finished_runs(path, "comm_accuracy", settings)
    setting = replace(SETTINGS[data], epochs=epochs, lr=lr)
    loaded = setting.data(BATCH_SIZE // world_size)
    loaded.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in dict.fromkeys((0, 1, 2) if seeds is None else seeds):
        for key in keys:
            if not any((run["row"], run["seed"]) == (key, seed) for run in runs):
                with small_training.quiet(1, seed):
                    measured = _run(_ROWS[key], setting, loaded, seed, num_test, world_size, optimizer, warmup)
                runs.append({"row": key, "seed": seed, **measured})
                console.print(Text(f"{_ROWS[key].label(warmup)}, seed {seed}: {_in_words(measured)}"))
            result = {
                "benchmark": "comm_accuracy",
                "settings": settings,
                "machine": describe_machine(torch.device("cpu")),
                "runs": runs,
                "rows": _rows(runs, warmup),
            }
            if path is not None:
                write_json(path, result)
    _print(console, result)
    if plot_path is not None:
        _plot(result["rows"], plot_path)
    return result


class _Figures(Callback):
    """Leaves a file: the objects of forked processes do not come back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            strategy = trainer.strategy
            stats = strategy.comm_stats() if isinstance(strategy, CompressedDDPStrategy) else {}
            self.path.write_text(json.dumps({"steps": trainer.global_step, **stats}))


def _run(
    row: _Row,
    setting: Setting,
    data: ImageDataModule,
    seed: int,
    num_test: int,
    world_size: int,
    optimizer: OptimizerName,
    warmup: float,
) -> dict[str, Any]:
    module = SmallClassifier(small_conv_net(data.input_shape[-1], data.num_classes), setting.lr, optimizer)
    method = METHODS["pgd_at"]
    if method.make is None:
        raise RuntimeError("PGD-AT has an objective")
    training = AdversarialTraining(method.make(), method.attack(setting, seed), eps_schedule=LinearRamp(setting.ramp))
    warmup_steps = 0
    strategy: DDPStrategy = DDPStrategy(start_method="fork")
    if row.options is not None:
        per_process = math.ceil(len(data.parts.train) / world_size)
        warmup_steps = round(warmup * setting.epochs * math.ceil(per_process / (BATCH_SIZE // world_size)))
        strategy = CompressedDDPStrategy(**row.options(), warmup_steps=warmup_steps, start_method="fork")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            max_epochs=setting.epochs,
            callbacks=[training, _Figures(figures)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        start = time.perf_counter()
        trainer.fit(module, train_dataloaders=data.train_dataloader())
        seconds = time.perf_counter() - start
        counted = json.loads(figures.read_text())
    dense = dense_bytes(sum(parameter.numel() for parameter in module.parameters()), world_size)
    return {
        **small_training.judge(module, {"pgd20": small_training.pgd20(setting)}, data, num_test),
        "steps": counted["steps"],
        "warmup_steps": warmup_steps,
        "bytes_per_step": counted.get("bytes_sent", dense * counted["steps"]) / counted["steps"],
        "bytes_dense_per_step": dense,
        "seconds": seconds,
    }


def _rows(runs: Sequence[dict[str, Any]], warmup: float) -> list[dict[str, Any]]:
    """Average over seeds; differences to DDP are taken seed by seed."""
    plain = {run["seed"]: run for run in runs if run["row"] == "ddp"}
    rows = []
    for key, row in _ROWS.items():
        own = [run for run in runs if run["row"] == key]
        if not own:
            continue
        figures: dict[str, Any] = {"row": key, "name": row.label(warmup), "seeds": sorted(run["seed"] for run in own)}
        figures["kilobytes_per_step"] = fmean(run["bytes_per_step"] for run in own) / 1000
        figures["ratio"] = fmean(run["bytes_dense_per_step"] / run["bytes_per_step"] for run in own)
        for name in _ACCURACIES:
            values = [run[name] for run in own]
            figures[name] = {"mean": fmean(values), "min": min(values), "max": max(values)}
            differences = [run[name] - plain[run["seed"]][name] for run in own if run["seed"] in plain]
            figures[name]["to_ddp"] = fmean(differences) if differences else None
        rows.append(figures)
    return rows


def _in_words(run: dict[str, Any]) -> str:
    accuracies = ", ".join(f"{name} {run[key]:.3f}" for key, name in _ACCURACIES.items())
    return f"{accuracies}, {run['bytes_per_step'] / 1000:.1f} kB per step, {run['seconds']:.0f} s"


def _print(console: Console, result: dict[str, Any]) -> None:
    settings = result["settings"]
    how = f"PGD-AT on {settings['world_size']} processes, {settings['epochs']} epochs, {settings['optimizer']}"
    title = f"{settings['data']}, {how}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("gradients")
    headings = [f"{name}{suffix}" for name in _ACCURACIES.values() for suffix in ("", "\nto DDP")]
    for heading in ("kB per step", "ratio", *headings, "seeds"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        cells = [f"{row['kilobytes_per_step']:.1f}", f"{row['ratio']:.1f}"]
        for name in _ACCURACIES:
            difference = row[name]["to_ddp"]
            cells += [f"{row[name]['mean']:.3f}", "-" if difference is None else f"{100 * difference:+.1f}"]
        table.add_row(row["name"], *(Text(cell) for cell in [*cells, str(len(row["seeds"]))]))
    console.print(table)


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError:
        raise UsageError("plot needs matplotlib: pip install 'robustdist[plots]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        for name, marker in zip(_ACCURACIES, "os", strict=True):
            accuracy = row[name]
            spread = [[accuracy["mean"] - accuracy["min"]], [accuracy["max"] - accuracy["mean"]]]
            label = row["name"] if marker == "o" else None
            place = row["kilobytes_per_step"], accuracy["mean"]
            axes.errorbar(*place, yerr=spread, fmt=marker, color=f"C{number}", capsize=3, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("kilobytes that a process sends per step")
    axes.set_ylabel("accuracy: circles clean, squares PGD-20")
    figure.legend(loc="outside right upper")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
