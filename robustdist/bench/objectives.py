"""``robustdist bench objectives``: what the training objectives reach with one small net."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from robustdist._lightning import PACKAGE, Callback, LightningModule, Trainer
from robustdist.attacks import PGD, Attack, LinearRamp
from robustdist.bench.machine import describe_machine
from robustdist.bench.models import small_conv_net
from robustdist.bench.output import check_out, make_console, write_json
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard
from robustdist.core.guard import forked_rng
from robustdist.data import DigitsDataModule, FashionMNISTDataModule, ImageDataModule, MNIST5kDataModule
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.evaluation import RobustTally
from robustdist.objectives import AWP, DAT, FGSMRS, MART, NFGSM, PGDAT, TRADES, FastBAT, FreeAT, GradAlign, Objective
from robustdist.types import check_count

__all__ = ["bench_objectives"]

_BATCH_SIZE = 100
_NUM_CHECKS = 15
_ACCURACIES = {"clean_acc": "clean", "pgd20_acc": "PGD-20", "margin_acc": "margin"}


@dataclass(frozen=True)
class _Setting:
    """A data set, its radius, the steps of multi-step attacks in training, and how it is trained on."""

    data: type[ImageDataModule]
    eps: float
    steps: int
    epochs: int
    lr: float = 5e-3
    ramp: float = 0.3


_SETTINGS = {
    "mnist5k": _Setting(MNIST5kDataModule, eps=0.3, steps=7, epochs=15),
    "fashion_mnist": _Setting(FashionMNISTDataModule, eps=0.1, steps=5, epochs=1),
    "digits": _Setting(DigitsDataModule, eps=0.1, steps=5, epochs=10),
}


@dataclass(frozen=True)
class _Method:
    """One row of the table.

    Attributes:
        steps, step_share: Steps of its attack and their size over the radius, if not the usual ones.
        passes: Epochs of the Trainer that make one pass over the data.
    """

    name: str
    make: Callable[[], Objective] | None
    steps: int | None = None
    step_share: float | None = None
    passes: int = 1

    def attack(self, setting: _Setting, seed: int) -> Attack:
        """Return the attack that the objective is given."""
        step_size = None if self.step_share is None else self.step_share * setting.eps
        return PGD(eps=setting.eps, steps=self.steps or setting.steps, step_size=step_size, seed=seed)


_METHODS = {
    "standard": _Method("ordinary training", None),
    "fgsm_rs": _Method("FGSM-RS", FGSMRS),
    "n_fgsm": _Method("N-FGSM", NFGSM),
    "n_fgsm_free": _Method("N-FGSM, noise not clipped", lambda: NFGSM(clip_noise=False)),
    "grad_align": _Method("GradAlign", GradAlign),
    "pgd2": _Method("PGD-2, step eps/2", PGDAT, steps=2, step_share=0.5),
    "pgd_at": _Method("PGD-AT", PGDAT),
    "trades": _Method("TRADES", TRADES),
    "mart": _Method("MART", MART),
    "awp": _Method("AWP on PGD-AT", AWP),
    "dat": _Method("DAT", DAT),
    "free_at": _Method("FreeAT, 4 replays", FreeAT, passes=4),
    "fast_bat": _Method("Fast-BAT, relative step", FastBAT),
    "fast_bat_paper": _Method("Fast-BAT, constant of the paper", lambda: FastBAT(step="paper")),
}


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
            mart, awp, dat, free_at, fast_bat, fast_bat_paper.
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
        "batch_size": _BATCH_SIZE,
        "lr": lr,
        "ramp": ramp,
        "threads": threads,
    }
    path = check_out(out)
    runs = [] if path is None else _finished(path, settings)
    loaded = setting.data(_BATCH_SIZE)
    loaded.setup()
    console = make_console()
    result: dict[str, Any] = {}
    for seed in chosen_seeds:
        for key in keys:
            method = _METHODS[key]
            wanted = {"objective": key, "seed": seed, "training": _describe(method, setting)}
            if not any(run.items() >= wanted.items() for run in runs):
                with _quiet(threads, seed):
                    measured = _run(method, setting, loaded, seed, num_test)
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


def _checked_setting(data: str, epochs: int | None, lr: float, ramp: float) -> _Setting:
    if data not in _SETTINGS:
        raise UsageError(f"data={data!r} is unknown: choose one of {', '.join(_SETTINGS)}")
    if not 0 < lr < float("inf"):
        raise UsageError(f"lr={lr} must be positive")
    if ramp:
        LinearRamp(ramp)  # refuses what is out of range
    setting = replace(_SETTINGS[data], lr=lr, ramp=ramp)
    return setting if epochs is None else replace(setting, epochs=check_count(epochs, "epochs"))


def _checked_keys(objectives: Sequence[str] | None) -> list[str]:
    keys = list(dict.fromkeys(_METHODS if objectives is None else objectives))
    unknown = [key for key in keys if key not in _METHODS]
    if unknown or not keys:
        raise UsageError(f"objectives={unknown} are unknown: choose some of {', '.join(_METHODS)}")
    return keys


def _finished(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that an earlier call with the same settings left in the file."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        same = content["benchmark"] == "objectives" and content["settings"] == settings
        runs: list[dict[str, Any]] = content["runs"]
    except (ValueError, KeyError, TypeError):
        same, runs = False, []
    if not same:
        raise UsageError(f"out={str(path)!r} holds something else than figures of these settings: choose another file")
    return runs


class _Classifier(LightningModule):
    """Cross-entropy with Adam and a one-cycle rate."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@contextmanager
def _quiet(threads: int, seed: int) -> Iterator[None]:
    """Run with ``threads`` threads and seeded random streams, without Lightning's messages and our own warnings."""
    logger = logging.getLogger(PACKAGE)
    level, threads_before = logger.level, torch.get_num_threads()
    try:
        logger.setLevel(logging.ERROR)
        torch.set_num_threads(threads)
        with warnings.catch_warnings(), forked_rng(torch.device("cpu"), seed):
            # what the guard warns about is in the table
            warnings.simplefilter("ignore", RobustDistWarning)
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        torch.set_num_threads(threads_before)
        logger.setLevel(level)


def _describe(method: _Method, setting: _Setting) -> str:
    """Return all that makes up the training of a row, so that a figure of another one is not taken for it."""
    return "ordinary" if method.make is None else f"{method.make()!r}, {method.attack(setting, 0)!r}"


def _run(method: _Method, setting: _Setting, data: ImageDataModule, seed: int, num_test: int) -> dict[str, Any]:
    module = _Classifier(small_conv_net(data.input_shape[-1], data.num_classes), setting.lr)
    callbacks: list[Callback] = []
    guard: CatastrophicOverfittingGuard | None = None
    if method.make is not None:
        num_steps = method.passes * setting.epochs * len(data.train_dataloader())
        guard = CatastrophicOverfittingGuard(every_n_steps=max(1, num_steps // _NUM_CHECKS))
        ramp = LinearRamp(setting.ramp) if setting.ramp else None
        callbacks = [AdversarialTraining(method.make(), method.attack(setting, seed), eps_schedule=ramp), guard]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=method.passes * setting.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()
    trainer.fit(module, train_dataloaders=data.train_dataloader())
    seconds = time.process_time() - start
    return {**_judge(module, setting, data, num_test), "cpu_seconds": seconds, "guard": _report(guard)}


def _judge(module: nn.Module, setting: _Setting, data: ImageDataModule, num_test: int) -> dict[str, Any]:
    step_size = setting.eps / 8
    attacks: dict[str, Attack] = {
        "pgd20": PGD(eps=setting.eps, steps=20, step_size=step_size),
        "margin": PGD(eps=setting.eps, steps=50, step_size=step_size, restarts=2, attack_loss="margin"),
    }
    x, y = (part[:num_test] for part in data.parts.test.tensors)
    tally = RobustTally(attacks)
    module.eval()
    for first in range(0, len(x), _BATCH_SIZE):
        part = slice(first, first + _BATCH_SIZE)
        tally.update(module, module, x[part], y[part], range(first, first + len(x[part])))
    found = tally.result()
    return {
        "clean_acc": found.clean_acc,
        **{f"{name}_acc": found.attack_acc(name) for name in attacks},
        "robust_acc": found.robust_acc,
    }


def _report(guard: CatastrophicOverfittingGuard | None) -> dict[str, Any] | None:
    if guard is None:
        return None
    collapses = [entry["epoch"] for entry in guard.history if entry["collapsed"]]
    return {"collapsed_in_epoch": collapses[0] if collapses else None, "history": guard.history}


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for key, method in _METHODS.items():
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
