"""Measure variants of one computation against each other: time in interleaved rounds, passes, memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from robustdist.core.guard import forked_rng

__all__ = [
    "MIB",
    "Clock",
    "PassCounter",
    "SavedTensors",
    "Spread",
    "Timing",
    "global_state",
    "interleave",
    "ratios",
    "schedule",
    "spread",
]

Clock = Literal["cpu", "wall"]
MIB = 2**20


@contextmanager
def global_state(device: torch.device, threads: int, seed: int = 0) -> Iterator[None]:
    """Run with ``threads`` threads, gradients and fixed random streams; leave all of them as they were."""
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.inference_mode(False), torch.enable_grad(), forked_rng(device, seed):
            yield
    finally:
        torch.set_num_threads(threads_before)


@dataclass(frozen=True)
class Timing:
    """What a call of a variant took; for a round, the mean of its calls.

    Attributes:
        cpu: Seconds of processor time of this process, all threads together.
        wall: Seconds that passed.
        cuda_peak: Most bytes held on the CUDA device beyond those held before; None on the CPU.
    """

    cpu: float
    wall: float
    cuda_peak: int | None = None

    def seconds(self, clock: Clock) -> float:
        """Return the time by ``clock``."""
        return self.cpu if clock == "cpu" else self.wall


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of ``values``, which must not be empty.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        Spread(median=2.0, min=1.0, max=3.0)
    """
    return Spread(statistics.median(values), min(values), max(values))


def ratios(timings: Sequence[Timing], unit: Sequence[Timing], clock: Clock) -> Spread:
    """Return the spread of the per-round ratios of ``timings`` to ``unit``.

    A ratio within one round cancels whatever slowed the machine during that round; a ratio of two medians does not.
    """
    # a clock may not have advanced during a very short run
    return spread(
        [
            timing.seconds(clock) / max(unit_timing.seconds(clock), 1e-9)
            for timing, unit_timing in zip(timings, unit, strict=True)
        ]
    )


def schedule(repeats: Mapping[str, int], number: int) -> list[str]:
    """Return the order of the calls in round ``number``.

    Names with the fewest repeats follow each other, starting one later each round; the calls of the others are spread
    evenly between them, so that they meet the same disturbances.

    Example:
        >>> schedule({"short": 3, "a": 1, "b": 1, "c": 1}, 1)
        ['short', 'b', 'short', 'c', 'short', 'a']
    """
    fewest = min(repeats.values())
    long = [name for name in repeats if repeats[name] == fewest]
    start = number % len(long)
    order: list[str] = []
    for place, name in enumerate(long[start:] + long[:start]):
        for other in (other for other in repeats if other not in long):
            order += [other] * sum(call * len(long) // repeats[other] == place for call in range(repeats[other]))
        order += [name] * fewest
    return order


def interleave(
    variants: Mapping[str, Callable[[], object]], repeats: Mapping[str, int], rounds: int, device: torch.device
) -> dict[str, list[Timing]]:
    """Time all variants in turn, in the order of ``schedule``.

    The caller warms up: the first round counts.

    Args:
        variants: Functions to run, by name.
        repeats: How many calls of each function make one timing, so that short ones are timed as long as others.
        rounds: Number of rounds, at least 1.
        device: Device the variants compute on; its queue is emptied before a clock is read.

    Returns:
        One timing per round for every name, the mean of its calls.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    for number in range(rounds):
        gc.collect()
        calls: dict[str, list[Timing]] = {name: [] for name in variants}
        for name in schedule(repeats, number):
            calls[name].append(_time(variants[name], device))
        for name, measured in calls.items():
            timings[name].append(_mean(measured))
    return timings


def _time(run: Callable[[], object], device: torch.device) -> Timing:
    on_cuda = device.type == "cuda"
    held = 0
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if on_cuda:
        torch.cuda.synchronize(device)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Timing(cpu, wall, torch.cuda.max_memory_allocated(device) - held if on_cuda else None)


def _mean(measured: Sequence[Timing]) -> Timing:
    peaks = [timing.cuda_peak for timing in measured if timing.cuda_peak is not None]
    return Timing(
        statistics.fmean(timing.cpu for timing in measured),
        statistics.fmean(timing.wall for timing in measured),
        max(peaks, default=None),
    )


class PassCounter:
    """Count the passes through ``model`` while the context is open.

    With F the cost of a forward pass, a gradient of the layers' inputs costs about F and a gradient of the weights
    another F. A training step is one of each, hence ``floor``. A backward pass through a gradient (double backward)
    counts as one more of both; it costs more than that, so the floor is low there.

    Attributes:
        forwards: Calls of ``model``.
        backwards: Backward passes from its output.
        weight_backwards: Those among them that also computed gradients of the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.forwards = 0
        self.backwards = 0
        self.weight_backwards = 0
        self._model = model
        self._hooks = ExitStack()
        # backward passes per run of the autograd engine: a loss of two outputs reaches the weights once
        self._in_run: dict[int, int] = {}

    @property
    def floor(self) -> float:
        """Cost of the passes in training steps."""
        return (self.forwards + self.backwards + self.weight_backwards) / 3

    def __enter__(self) -> PassCounter:
        weight: Any = next(parameter for parameter in self._model.parameters() if parameter.requires_grad)
        for handle in (
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.register_forward_hook(self._after_forward),
            weight.register_hook(self._weight_backward),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self.forwards += 1

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(self._backward)

    def _backward(self, grad: Tensor) -> None:
        self.backwards += 1
        run = torch._C._current_graph_task_id()
        self._in_run[run] = self._in_run.get(run, 0) + 1

    def _weight_backward(self, grad: Tensor) -> None:
        self.weight_backwards += self._in_run[torch._C._current_graph_task_id()]


class SavedTensors:
    """Track the bytes that autograd keeps for backward while the context is open.

    Every storage counts once, however many nodes keep it, and stops counting when the last of them lets it go.
    Parameters and buffers of ``model`` do not count: they are there anyway.

    Attributes:
        peak: Largest number of bytes kept at one time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.peak = 0
        self._live = 0
        self._users: dict[int, int] = {}
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._own:
            return _Kept(tensor, lambda: None)
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1:
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
        num_bytes = storage.nbytes()

        def release() -> None:
            self._users[address] -= 1
            if self._users[address] == 0:
                del self._users[address]
                self._live -= num_bytes

        return _Kept(tensor, release)


class _Kept:
    """A saved tensor that reports when autograd lets it go."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()
