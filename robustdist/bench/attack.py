"""``robustdist bench attack``: what one step of adversarial training costs, in standard steps."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from robustdist.bench.attack_rows import EPS, REFERENCE, STEP_SIZE, UNIT, AttackFunction, Spec, attack_specs
from robustdist.bench.machine import describe_machine, installed_version
from robustdist.bench.measure import (
    MIB,
    Clock,
    PassCounter,
    SavedTensors,
    Timing,
    global_state,
    interleave,
    ratios,
    spread,
)
from robustdist.bench.models import PreActResNet, ResNet
from robustdist.bench.output import check_out, make_console, write_json
from robustdist.core.fast_path import FastPath
from robustdist.errors import UsageError
from robustdist.objectives import Objective
from robustdist.types import check_count

__all__ = ["bench_attack"]

_NUM_CLASSES = 10
_LR = 0.01
_MOMENTUM = 0.9


@dataclass
class _Row:
    """Figures of one row as they are written to the file; times in milliseconds, memory in MiB."""

    key: str
    name: str
    note: str | None = None
    ratio: dict[str, float] | None = None
    cpu_ratio: dict[str, float] | None = None
    wall_ratio: dict[str, float] | None = None
    ratio_to_torchattacks: dict[str, float] | None = None
    cpu_ms: dict[str, float] | None = None
    wall_ms: dict[str, float] | None = None
    repeats: int | None = None
    forwards: int | None = None
    backwards: int | None = None
    weight_backwards: int | None = None
    floor: float | None = None
    attack_saved_mib: float | None = None
    step_saved_mib: float | None = None
    cuda_peak_mib: float | None = None


@dataclass
class _Trainer:
    """One variant with a model, an optimiser and a batch of its own."""

    spec: Spec
    model: nn.Module
    x: Tensor
    y: Tensor
    attack: AttackFunction = field(init=False)
    objective: Objective | None = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    fast_path: FastPath = field(init=False)

    def __post_init__(self) -> None:
        if self.spec.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.attack = self.spec.make_attack(self.model)
        self.objective = None if self.spec.objective is None else self.spec.objective()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LR, momentum=_MOMENTUM)
        self.fast_path = FastPath(**(self.spec.fast_path or {}))
        if self.spec.fast_path is not None:
            self.fast_path.prepare(self.model, self.x)

    def step(self) -> None:
        """Take one step of adversarial training."""
        if self.objective is None:
            self.update(self.attack_batch())
        else:
            self.minimise(self.objective)

    def attack_batch(self) -> Tensor:
        """Return the batch to train on."""
        if self.attack is None:
            return self.x
        autocast = torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.spec.bf16_attack)
        with autocast, self.fast_path.applied(self.model):
            return self.attack(self.model, self.x, self.y)

    def update(self, x: Tensor) -> None:
        """Take one training step on ``x``."""
        self.optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(self.model(x), self.y))
        self.optimizer.step()

    def minimise(self, objective: Objective) -> None:
        """Take one step on ``objective``, which runs its own attack."""
        assert self.spec.inner is not None
        self.optimizer.zero_grad()
        torch.autograd.backward(objective(self.model, self.x, self.y, attack=self.spec.inner))
        objective.after_backward()
        self.optimizer.step()

    def inspect(self, row: _Row) -> None:
        """Run one step with every counter attached, write the counts into ``row``."""
        with PassCounter(self.model) as passes, SavedTensors(self.model) as saved:
            if self.objective is not None:
                self.minimise(self.objective)
            else:
                x_adv = self.attack_batch()
                attack_peak = saved.peak
                self.update(x_adv)
        row.forwards = passes.forwards
        row.backwards = passes.backwards
        row.weight_backwards = passes.weight_backwards
        row.floor = passes.floor
        row.attack_saved_mib = None if self.attack is None else attack_peak / MIB
        row.step_saved_mib = saved.peak / MIB


def bench_attack(
    out: str | None = None,
    rounds: int = 5,
    batch_size: int = 64,
    width: int = 16,
    steps: int = 10,
    threads: int = 1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    rows: list[str] | None = None,
) -> dict[str, Any]:
    """Measure what adversarial training costs per step, in standard training steps on the same machine.

    One row is one way to make the adversarial batch (linf, eps 8/255, step 2/255) plus one SGD step with momentum on
    it, or one such step on an objective, for a small pre-activation ResNet-18 on random 3x32x32 images; the rows
    "ResNet" are of a post-activation net of the same size, in standard steps of that net. The rows are run in turn,
    once per round, after a round that does not count; cheap steps are repeated until they take about as long as the
    longest, spread over the round. A ratio is taken within one round, and the table shows the median of the rounds. On
    the CPU with one thread the clock is processor time, which other programs disturb least; otherwise wall time.
    "floor" is the cost of the counted passes when a forward pass, an input gradient and a weight gradient cost the
    same.

    Args:
        out: JSON file for the same figures; its folder must exist.
        rounds: Number of rounds that count.
        batch_size: Images per batch.
        width: Channels of the first stage of the network.
        steps: Gradient steps of the PGD rows.
        threads: Threads that torch may use on the CPU.
        device: "cpu", "cuda", or "auto" for CUDA where there is a device.
        rows: Keys of the rows to run, as in the file; the standard step is always one. None for all.

    Returns:
        ``benchmark``, ``settings``, ``machine`` and ``rows``, as in the file.

    Raises:
        UsageError: If an argument is out of range, before anything is measured.
    """
    counts = {"rounds": rounds, "batch_size": batch_size, "width": width, "steps": steps, "threads": threads}
    for option, value in counts.items():
        check_count(value, option)
    path = check_out(out)
    chosen = _choose_device(device)
    clock: Clock = "cpu" if chosen.type == "cpu" and threads == 1 else "wall"

    specs = _chosen(attack_specs(steps), rows)
    with global_state(chosen, threads):
        measured = _measure(specs, rounds, batch_size, width, chosen, clock)
    torchattacks = None if any(spec.note for spec in specs) else installed_version("torchattacks")
    result: dict[str, Any] = {
        "benchmark": "attack",
        "settings": {
            "rounds": rounds,
            "batch_size": batch_size,
            "width": width,
            "steps": steps,
            "threads": threads,
            "norm": "linf",
            "eps": EPS,
            "step_size": STEP_SIZE,
            "optimizer": f"SGD(lr={_LR}, momentum={_MOMENTUM})",
            "clock": clock,
        },
        "machine": {**describe_machine(chosen), "torchattacks": torchattacks},
        "rows": [asdict(row) for row in measured],
    }
    if path is not None:
        write_json(path, result)
    _print(make_console(), measured, result["settings"], result["machine"])
    return result


def _chosen(specs: list[Spec], keys: list[str] | None) -> list[Spec]:
    known = [spec.key for spec in specs]
    for key in keys or ():
        if key not in known:
            raise UsageError(f"rows has no {key!r}: choose among {', '.join(known)}")
    wanted = set(known if keys is None else keys)
    units = {UNIT} | {spec.unit for spec in specs if spec.key in wanted}
    return [spec for spec in specs if spec.key in wanted | units]


def _choose_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device={name!r} is unknown: choose auto, cpu or cuda")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("device='cuda' but torch finds no CUDA device: set device=cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _measure(
    specs: list[Spec], rounds: int, batch_size: int, width: int, device: torch.device, clock: Clock
) -> list[_Row]:
    models = {kind: kind(width, _NUM_CLASSES).to(device) for kind in (PreActResNet, ResNet)}
    x = torch.rand(batch_size, 3, 32, 32, device=device)
    y = torch.randint(_NUM_CLASSES, (batch_size,), device=device)
    rows = {spec.key: _Row(spec.key, spec.name, spec.note) for spec in specs}
    trainers = {
        spec.key: _Trainer(spec, copy.deepcopy(models[spec.make_model]), x, y) for spec in specs if spec.note is None
    }
    # one round that does not count: it warms up and carries the counters, which cost time
    for key, trainer in trainers.items():
        trainer.inspect(rows[key])
    floors = {key: rows[key].floor or 1.0 for key in trainers}
    repeats = {key: round(max(floors.values()) / floor) for key, floor in floors.items()}
    timings = interleave({key: trainer.step for key, trainer in trainers.items()}, repeats, rounds, device)
    for key, measured in timings.items():
        rows[key].repeats = repeats[key]
        unit = trainers[key].spec.unit
        # torchattacks attacks the first network
        _fill_times(rows[key], measured, timings[unit], timings.get(REFERENCE) if unit == UNIT else None, clock)
    return list(rows.values())


def _fill_times(
    row: _Row, measured: list[Timing], unit: list[Timing], reference: list[Timing] | None, clock: Clock
) -> None:
    row.cpu_ratio = asdict(ratios(measured, unit, "cpu"))
    row.wall_ratio = asdict(ratios(measured, unit, "wall"))
    row.ratio = row.cpu_ratio if clock == "cpu" else row.wall_ratio
    if reference is not None:
        row.ratio_to_torchattacks = asdict(ratios(measured, reference, clock))
    row.cpu_ms = asdict(spread([1000 * timing.cpu for timing in measured]))
    row.wall_ms = asdict(spread([1000 * timing.wall for timing in measured]))
    peaks = [timing.cuda_peak for timing in measured if timing.cuda_peak is not None]
    row.cuda_peak_mib = max(peaks) / MIB if peaks else None


def _print(console: Console, rows: list[_Row], settings: dict[str, Any], machine: dict[str, Any]) -> None:
    on_cuda = machine["device"] == "cuda"
    table = Table(title="One training step in standard steps", title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("ratio", justify="right")
    table.add_column("min-max", justify="right")
    table.add_column("vs torch-\nattacks", justify="right")
    table.add_column("floor", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("forward/\nbackward", justify="right")
    table.add_column("saved MiB\nattack/step", justify="right")
    if on_cuda:
        table.add_column("peak MiB\nCUDA", justify="right")
    for row in rows:
        table.add_row(row.name, *_cells(row, settings["clock"], on_cuda))
    console.print(table)
    for note in dict.fromkeys(row.note for row in rows if row.note is not None):
        console.print(Text(f"torchattacks is {note}"))
    for line in _caption(settings, machine):
        console.print(Text(line))


def _cells(row: _Row, clock: Clock, on_cuda: bool) -> list[Text]:
    times = row.cpu_ms if clock == "cpu" else row.wall_ms
    if row.ratio is None or times is None:
        return [Text("skipped")]
    relative = "-" if row.ratio_to_torchattacks is None else f"{row.ratio_to_torchattacks['median']:.2f}"
    attack_saved = "-" if row.attack_saved_mib is None else f"{row.attack_saved_mib:.1f}"
    cells = [
        f"{row.ratio['median']:.2f}",
        f"{row.ratio['min']:.2f}-{row.ratio['max']:.2f}",
        relative,
        f"{row.floor:.2f}",
        f"{times['median']:.0f}",
        f"{row.forwards}/{row.backwards}",
        f"{attack_saved}/{row.step_saved_mib:.1f}",
    ]
    if on_cuda:
        cells.append(f"{row.cuda_peak_mib:.1f}")
    return [Text(cell) for cell in cells]


def _caption(settings: dict[str, Any], machine: dict[str, Any]) -> list[str]:
    units = machine["bf16_units"]
    bf16 = "unknown" if units is None else ", ".join(units) or "none, the bf16 rows are emulated"
    torchattacks = f", torchattacks {machine['torchattacks']}" if machine["torchattacks"] else ""
    clock = "process CPU time" if settings["clock"] == "cpu" else "wall time"
    return [
        f"{machine['processor']} ({machine['device']}, {machine['num_cpus']} CPUs, bf16 units: {bf16})",
        f"torch {machine['torch']}{torchattacks}, threads {settings['threads']}, rounds {settings['rounds']}, "
        f"batch {settings['batch_size']}, width {settings['width']}, clock: {clock}",
    ]
