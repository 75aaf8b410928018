"""``robustdist bench autoattack``: our AutoAttack against the authors' and against a preset of that name."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from robustdist.attacks import APGD, AutoAttack
from robustdist.bench.judged_nets import CASES, Judged, prepare
from robustdist.bench.machine import describe_machine, installed_version
from robustdist.bench.measure import global_state
from robustdist.bench.output import check_out, make_console, write_json
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["bench_auto_attack"]

_REFERENCE = "pyautoattack"
_JUDGES = {
    "exact": "robustdist, float32",
    "fast": "robustdist, bf16 search, channels last",
    "channels_last": "robustdist, float32 search, channels last",
    "folded": "robustdist, float32 search, channels last, batch norms folded",
    _REFERENCE: "pyautoattack, standard",
    "torchattacks": "torchattacks.AutoAttack('standard')",
}
_SURVIVORS = (1, 2, 4, 8, 16, 32, 64)
_QUEUE_STEPS = 10
#: So small that nothing ever falls: the number of survivors stays what the table says.
_QUEUE_EPS = 1e-6


@dataclass
class _Verdict:
    """What one judge says about one network."""

    judge: str
    robust_acc: float
    cpu_seconds: float
    wall_seconds: float
    robust: list[bool]
    stages: dict[str, int] | None = None


def bench_auto_attack(
    cases: list[str] | None = None,
    judges: list[str] | None = None,
    out: str | None = None,
    num_images: int = 100,
    steps: int = 100,
    queries: int = 5000,
    nets: str | None = None,
    queue: bool = True,
    threads: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare robust accuracies and times of AutoAttack implementations at equal budgets.

    Every judge attacks the same images of the same network one after the other in this process: APGD on cross-entropy,
    APGD and FAB on nine targets, ``steps`` steps each, and Square with ``queries`` queries. torchattacks' preset of the
    same name is run as it comes; it takes 10 steps, which is why its accuracies are higher. Networks: "fixture", the
    pretrained MNIST net of ccexam at eps 0.1; "undefended", a ResNet (width 8) on photo-patches at 14/255; "mnist", the
    small net on MNIST-5k trained by PGD-7 at 0.3; "photo", the ResNet trained by PGD-3 at 4/255; "digits", a net for a
    quick look. With one thread a ratio is one of processor times, otherwise of wall times.

    The second table shows targeted APGD on a fixed number of images that never fall: (image, target) evaluated per
    second with targets queued up to fill batches of 64, and with one target after the other.

    Args:
        cases: Networks; default fixture, undefended, mnist and photo.
        judges: Implementations; default exact, fast, channels_last, folded, pyautoattack and torchattacks.
        out: JSON file for the figures; its folder must exist.
        num_images: Images per network, in one batch.
        steps: Gradient steps and projections.
        queries: Queries of Square.
        nets: Folder where trained weights are kept and looked for, as ``<case>.pt``.
        queue: Whether to measure the second table.
        threads: Threads that torch may use.
        seed: Seed of training and attacks.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``cases`` and ``queue``, as in the file.

    Raises:
        UsageError: If an argument is out of range, before anything is measured.
    """
    chosen = _chosen(cases, tuple(CASES), ("fixture", "undefended", "mnist", "photo"), "cases")
    asked = _chosen(judges, tuple(_JUDGES), tuple(_JUDGES), "judges")
    for option, value in {"num_images": num_images, "steps": steps, "queries": queries, "threads": threads}.items():
        check_count(value, option)
    path, folder = check_out(out), None if nets is None else Path(nets)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"nets={nets!r} is no folder: create it or choose another one")
    settings: dict[str, Any] = {
        "num_images": num_images,
        "steps": steps,
        "queries": queries,
        "threads": threads,
        "seed": seed,
        "clock": "cpu" if threads == 1 else "wall",
    }
    console = make_console()
    measured: list[dict[str, Any]] = []
    for name in chosen:
        case = CASES[name]
        entry: dict[str, Any] = {"case": name, "about": case.about, "eps": case.eps, "note": None, "rows": []}
        measured.append(entry)
        if case.missing:
            entry["note"] = f"skipped: {', '.join(case.missing)} not installed"
            _print(console, entry)
            continue
        with global_state(torch.device("cpu"), threads, seed):
            judged = prepare(name, num_images, folder)
            verdicts = [_judge(judge, judged, case.eps, settings) for judge in asked if not _missing(judge)]
            entry["clean_acc"] = _accuracy(_right(judged, judged.x))
            entry["rows"] = _rows(verdicts, settings["clock"])
            entry["queue"] = _throughput(judged) if queue else []
        _print(console, entry)
    result = {
        "benchmark": "autoattack",
        "settings": settings,
        "machine": {
            **describe_machine(torch.device("cpu")),
            **{name: installed_version(name) for name in (_REFERENCE, "torchattacks")},
        },
        "cases": measured,
    }
    if path is not None:
        write_json(path, result)
    return result


def _chosen(given: list[str] | None, known: tuple[str, ...], usual: tuple[str, ...], option: str) -> list[str]:
    names = list(dict.fromkeys(usual if given is None else given))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"{option}={unknown} are unknown: choose some of {', '.join(known)}")
    return names


def _missing(judge: str) -> bool:
    return judge in (_REFERENCE, "torchattacks") and installed_version(judge) is None


def _judge(judge: str, judged: Judged, eps: float, settings: dict[str, Any]) -> _Verdict:
    run = _RUNS[judge]
    cpu, wall = time.process_time(), time.perf_counter()
    # the others print their progress
    with contextlib.redirect_stdout(io.StringIO()):
        x_adv, stages = run(judged, eps, settings)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    away = float((x_adv.double() - judged.x.double()).abs().max())
    inside = away <= eps + 1e-6 and 0.0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1.0
    if not inside:
        raise RuntimeError(f"{judge} left the ball: moved by {away:g}, eps={eps:g}")
    robust = _right(judged, x_adv) & _right(judged, judged.x)
    return _Verdict(judge, _accuracy(robust), cpu, wall, robust.tolist(), stages)


def _ours(**options: Any) -> Callable[[Judged, float, dict[str, Any]], tuple[Tensor, dict[str, int]]]:
    def run(judged: Judged, eps: float, settings: dict[str, Any]) -> tuple[Tensor, dict[str, int]]:
        attack = AutoAttack(
            eps=eps, steps=settings["steps"], queries=settings["queries"], seed=settings["seed"], **options
        )
        found = attack.run(judged.net, judged.x, judged.y)
        assert found.stage is not None
        broken = {name: int((found.stage == place).sum()) for place, name in enumerate(attack.stages)}
        return found.x_adv, broken

    return run


def _theirs(judged: Judged, eps: float, settings: dict[str, Any]) -> tuple[Tensor, None]:
    """The authors' implementation; budgets are given at construction, where the checkpoints are computed."""
    from pyautoattack import AutoAttack as Reference
    from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
    from pyautoattack.fab_pt import FABAttack_PT
    from pyautoattack.square import SquareAttack

    net, steps = judged.net, settings["steps"]
    common = {"eps": eps, "norm": "Linf", "seed": settings["seed"], "device": "cpu"}
    reference = Reference(net, version="standard", **common)
    reference.apgd = APGDAttack(net, n_iter=steps, n_restarts=1, **common)
    reference.apgd_targeted = APGDAttack_targeted(net, n_iter=steps, n_restarts=1, n_target_classes=9, **common)
    reference.fab = FABAttack_PT(net, n_iter=steps, n_restarts=1, n_target_classes=9, **common)
    reference.square = SquareAttack(net, n_queries=settings["queries"], resc_schedule=False, **common)
    x_adv, _ = reference.run_standard_evaluation(judged.x, judged.y, batch_size=len(judged.x))
    return x_adv.detach(), None


def _preset(judged: Judged, eps: float, settings: dict[str, Any]) -> tuple[Tensor, None]:
    import torchattacks

    preset = torchattacks.AutoAttack(judged.net, norm="Linf", eps=eps, version="standard", seed=settings["seed"])
    x_adv: Tensor = preset(judged.x, judged.y)
    return x_adv.detach(), None


_RUNS: dict[str, Callable[[Judged, float, dict[str, Any]], tuple[Tensor, dict[str, int] | None]]] = {
    "exact": _ours(),
    "fast": _ours(precision="bf16", channels_last=True),
    # for machines without bfloat16 units, where emulation makes the row above the slowest
    "channels_last": _ours(channels_last=True),
    "folded": _ours(channels_last=True, fold_batch_norm=True),
    _REFERENCE: _theirs,
    "torchattacks": _preset,
}


def _right(judged: Judged, x: Tensor) -> Tensor:
    with torch.no_grad():
        right: Tensor = judged.net(x).argmax(1) == judged.y
    return right


def _accuracy(right: Tensor) -> float:
    return float(right.double().mean())


def _rows(verdicts: list[_Verdict], clock: str) -> list[dict[str, Any]]:
    reference = next((verdict for verdict in verdicts if verdict.judge == _REFERENCE), None)
    rows = []
    for verdict in verdicts:
        row: dict[str, Any] = {
            "judge": verdict.judge,
            "name": _JUDGES[verdict.judge],
            "robust_acc": verdict.robust_acc,
            "cpu_seconds": verdict.cpu_seconds,
            "wall_seconds": verdict.wall_seconds,
            "broken_by": verdict.stages,
            "ratio": None,
            "wall_ratio": None,
            "disagree": None,
        }
        if reference is not None:
            cpu = verdict.cpu_seconds / reference.cpu_seconds
            wall = verdict.wall_seconds / reference.wall_seconds
            row["ratio"], row["wall_ratio"] = (cpu if clock == "cpu" else wall), wall
            pairs = zip(verdict.robust, reference.robust, strict=True)
            row["disagree"] = sum(mine != theirs for mine, theirs in pairs)
        rows.append(row)
    return rows


def _throughput(judged: Judged) -> list[dict[str, float]]:
    """Return evaluations of (image, target) per second of targeted APGD, queued and target by target."""
    right = _right(judged, judged.x).nonzero()[:, 0]
    rows = []
    for num in (num for num in _SURVIVORS if num <= len(right)):
        x, y = judged.x[right[:num]], judged.y[right[:num]]
        row: dict[str, float] = {"survivors": num}
        for key, batch_size in (("queued", max(_SURVIVORS)), ("one_by_one", num)):
            attack = APGD(eps=_QUEUE_EPS, steps=_QUEUE_STEPS, attack_loss="dlr_targeted", batch_size=batch_size, seed=0)
            attack.variant(steps=1)(judged.net, x, y)  # warms up
            start = time.process_time()
            attack(judged.net, x, y)
            row[key] = num * 9 * (_QUEUE_STEPS + 1) / (time.process_time() - start)
        rows.append(row)
    return rows


def _print(console: Console, entry: dict[str, Any]) -> None:
    title = f"{entry['case']}: {entry['about']}, eps {entry['eps']:.4g}"
    if entry["note"] is not None:
        console.print(Text(f"{title}: {entry['note']}"))
        return
    table = Table(title=f"{title}, clean {entry['clean_acc']:.3f}", title_justify="left", box=None, pad_edge=False)
    for column in ("judge", "robust", "differs", "cpu s", "wall s", "ratio", "broken by"):
        table.add_column(column, justify="left" if column in ("judge", "broken by") else "right")
    for row in entry["rows"]:
        stages = "" if row["broken_by"] is None else " ".join(f"{name} {num}" for name, num in row["broken_by"].items())
        table.add_row(
            Text(row["name"]),
            f"{row['robust_acc']:.3f}",
            "-" if row["disagree"] is None else str(row["disagree"]),
            f"{row['cpu_seconds']:.1f}",
            f"{row['wall_seconds']:.1f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            Text(stages),
        )
    console.print(table)
    for row in entry["queue"]:
        gain = row["queued"] / row["one_by_one"]
        console.print(
            Text(
                f"  {row['survivors']:.0f} survivors: {row['queued']:.0f} items/s queued, "
                f"{row['one_by_one']:.0f} one target after the other ({gain:.2f})"
            )
        )
