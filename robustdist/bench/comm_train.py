"""``robustdist bench comm_train``: seconds, bytes and accuracy of a training on a slow link, per way to communicate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from robustdist._lightning import Callback, DDPStrategy, LightningModule, Trainer
from robustdist.bench import small_training
from robustdist.bench.links import LINKS, Link, open_links, sent_by
from robustdist.bench.machine import describe_machine
from robustdist.bench.output import check_out, make_console, write_json
from robustdist.bench.ranks import run_task
from robustdist.comm import QSGD, BitSchedule, Identity, Int8, MQGrad, Sign
from robustdist.comm.cost import dense_bytes
from robustdist.errors import UsageError
from robustdist.strategies import CompressedDDPStrategy
from robustdist.types import check_count

__all__ = ["bench_comm_train", "run_rank"]

_BATCH_SIZE = 64
_WARM_UP = 3


@dataclass(frozen=True)
class _Row:
    name: str
    options: Callable[[int], dict[str, Any]] | None  # of the number of steps; None: Lightning's DDP


_ROWS = {
    "ddp": _Row("DDP, float32", None),
    "identity": _Row("Identity", lambda steps: {"compressor": Identity()}),
    "auto": _Row("auto", lambda steps: {"compressor": "auto"}),
    "int8": _Row("Int8", lambda steps: {"compressor": Int8()}),
    "qsgd8": _Row("QSGD, 8 bits", lambda steps: {"compressor": QSGD(bits=8)}),
    "qsgd4": _Row("QSGD, 4 bits", lambda steps: {"compressor": QSGD(bits=4)}),
    "qsgd2": _Row("QSGD, 2 bits", lambda steps: {"compressor": QSGD(bits=2)}),
    "schedule": _Row(
        "QSGD, 2 then 8 bits", lambda steps: {"compressor": QSGD(), "bits": BitSchedule({0: 2, steps // 2: 8})}
    ),
    "mqgrad": _Row("QSGD, bits by MQGrad", lambda steps: {"compressor": QSGD(), "bits": MQGrad()}),
    "sign": _Row("Sign", lambda steps: {"compressor": Sign(), "collective": "chunked"}),
}


def bench_comm_train(
    rows: list[str] | None = None,
    link: Link = "100mbit",
    world_size: int = 2,
    steps: int = 60,
    width: int = 1024,
    rounds: int = 1,
    data: Literal["fashion_mnist", "mnist5k"] = "fashion_mnist",
    out: str | None = None,
) -> dict[str, Any]:
    """Train an unmodified module through the Trainer on links with a rate limit.

    A perceptron with two hidden layers on 28x28 images, ordinary training with Adam, 64 images per process and step.
    Ranks and links are those of ``bench comm``. Rows take turns. Seconds are those of a step without the first three:
    the median over steps and rounds. Bytes are what a rank's interface sent in all of the training, headers included,
    and what the strategy counts. Accuracy is on the first 2000 test images.

    Args:
        rows: Rows, by key; default ddp, auto, int8, qsgd4, sign. Also identity, qsgd8, qsgd2, schedule, mqgrad.
        link: "100mbit", "1gbit", or "none" for the loopback device without a limit.
        world_size: Number of ranks.
        steps: Optimiser steps.
        width: Units of the hidden layers; 1024 makes 1.9 million parameters, 2048 makes 5.8 million.
        rounds: Trainings per row.
        data: Data set: fashion_mnist, or mnist5k.
        out: JSON file for the figures; its folder must exist.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``link``, ``load``, ``rows`` and ``runs``, as in the file.

    Raises:
        UsageError: If an argument is out of range, before anything is measured.
    """
    keys = list(dict.fromkeys(["ddp", "auto", "int8", "qsgd4", "sign"] if rows is None else rows))
    unknown = [key for key in keys if key not in _ROWS]
    if unknown or not keys:
        raise UsageError(f"rows={unknown} are unknown: choose some of {', '.join(_ROWS)}")
    if data not in ("fashion_mnist", "mnist5k"):
        raise UsageError(f"data={data!r} is unknown: choose fashion_mnist or mnist5k")
    if link not in LINKS:
        raise UsageError(f"link={link!r} must be one of {', '.join(LINKS)}")
    for option, value in (("steps", steps), ("width", width), ("rounds", rounds)):
        check_count(value, option)
    if steps <= _WARM_UP:
        raise UsageError(f"steps={steps} must be more than the {_WARM_UP} that are not timed")
    if not 2 <= check_count(world_size, "world_size") <= 200:
        raise UsageError(f"world_size={world_size} must be from 2 to 200")
    path = check_out(out)
    console = make_console()
    load, runs = [list(os.getloadavg())], []
    with open_links(world_size, link) as links:
        if links.note:
            console.print(Text(links.note))
        for number in range(rounds):
            for key in keys:
                arguments = {"row": key, "data": data, "steps": steps, "width": width, "seed": number}
                ranks = run_task("train", arguments, links=links, world_size=world_size, timeout=30.0 * steps + 120)
                runs.append({"row": key, "round": number, "ranks": ranks})
    load.append(list(os.getloadavg()))
    found = {
        "benchmark": "comm_train",
        "settings": {
            "link": link,
            "world_size": world_size,
            "steps": steps,
            "width": width,
            "rounds": rounds,
            "data": data,
        },
        "machine": describe_machine(torch.device("cpu")),
        "link": {"limit": links.limit, "note": links.note},
        "load": load,
        "rows": _rows(runs, keys),
        "runs": runs,
    }
    _print(console, found)
    if path is not None:
        write_json(path, found)
    return found


# --- what a rank does


class _Perceptron(LightningModule):
    """Two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class _Watch(Callback):
    """Notes when steps end, and the bits."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.bits: list[int] = []
        self.codec = ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, CompressedDDPStrategy) and strategy.engine is not None:
            self.codec = repr(strategy.engine.codec)
            if strategy.chosen_bits is not None:
                self.bits.append(strategy.chosen_bits)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.times.append(time.perf_counter())


def run_rank(row: str, data: str, steps: int, width: int, seed: int) -> dict[str, Any]:
    """Train on one rank and return what it saw."""
    options = _ROWS[row].options
    world_size = int(os.environ["WORLD_SIZE"])
    with small_training.quiet(1, seed):
        images = small_training.SETTINGS[data].data(_BATCH_SIZE)
        images.setup()
        module, watch = _Perceptron(width), _Watch()
        strategy = DDPStrategy() if options is None else CompressedDDPStrategy(**options(steps))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=world_size,
            strategy=strategy,
            max_steps=steps,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        before = sent_by()
        trainer.fit(module, train_dataloaders=images.train_dataloader())
        after = sent_by()
        x, y = (part[:2000] for part in images.parts.test.tensors)
        with torch.no_grad():
            accuracy = float((module.eval()(x).argmax(1) == y).float().mean())
    stats = strategy.comm_stats() if isinstance(strategy, CompressedDDPStrategy) else {}
    dense = steps * dense_bytes(sum(parameter.numel() for parameter in module.parameters()), world_size)
    return {
        "seconds": [end - begin for begin, end in zip(watch.times, watch.times[1:], strict=False)][_WARM_UP - 1 :],
        "nic_bytes": None if before is None or after is None else after - before,
        "payload_bytes": stats.get("bytes_sent", dense),
        "dense_bytes": dense,
        "wait_ms": 1000 * stats["wait_seconds"] / stats["steps"] if stats else None,
        "bits": watch.bits,
        "codec": watch.codec,
        "accuracy": accuracy,
    }


# --- figures


def _rows(runs: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    def seconds(key: str, number: int | None = None) -> float:
        """A step takes as long as on the slowest rank."""
        steps = [
            max(times)
            for run in runs
            if run["row"] == key and number in (None, run["round"])
            for times in zip(*(rank["seconds"] for rank in run["ranks"]), strict=True)
        ]
        return float(median(steps))

    rows = []
    for key in keys:
        own = [run for run in runs if run["row"] == key]
        ranks = [rank for run in own for rank in run["ranks"]]
        paired = [seconds("ddp", run["round"]) / seconds(key, run["round"]) for run in own] if "ddp" in keys else []
        waits = [rank["wait_ms"] for rank in ranks if rank["wait_ms"] is not None]
        nic = [rank["nic_bytes"] for rank in ranks if rank["nic_bytes"] is not None]
        bits = [bits for rank in ranks for bits in rank["bits"]]
        rows.append(
            {
                "row": key,
                "name": _ROWS[key].name,
                "codec": ranks[0]["codec"],
                "seconds_per_step": seconds(key),
                "faster_than_ddp": median(paired) if paired else None,
                "wait_ms": median(waits) if waits else None,
                "nic_bytes": median(nic) if nic else None,
                "payload_bytes": median(rank["payload_bytes"] for rank in ranks),
                "ratio": median(rank["dense_bytes"] / rank["payload_bytes"] for rank in ranks),
                "mean_bits": sum(bits) / len(bits) if bits else None,
                "accuracy": median(run["ranks"][0]["accuracy"] for run in own),
            }
        )
    return rows


def _print(console: Console, found: Mapping[str, Any]) -> None:
    settings = found["settings"]
    title = f"{settings['world_size']} ranks, {settings['link']}, {settings['steps']} steps, width {settings['width']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("gradients")
    for heading in ("s per step", "faster", "wait ms", "NIC MB", "payload MB", "ratio", "mean bits", "accuracy"):
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        name = f"{row['name']}: {row['codec'].partition('(')[0]}" if row["row"] == "auto" else row["name"]
        cells = [
            f"{row['seconds_per_step']:.3f}",
            _number(row["faster_than_ddp"], ".2f"),
            _number(row["wait_ms"], ".0f"),
            _number(row["nic_bytes"], ".1f", 1e-6),
            f"{row['payload_bytes'] / 1e6:.1f}",
            f"{row['ratio']:.1f}",
            _number(row["mean_bits"], ".1f"),
            f"{row['accuracy']:.3f}",
        ]
        table.add_row(name, *(Text(cell) for cell in cells))
    console.print(table)
    first, last = (f"{load[0]:.1f}" for load in found["load"])
    console.print(Text(f"load {first} before, {last} after; {found['machine']['processor']}"))


def _number(value: float | None, style: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, style)
