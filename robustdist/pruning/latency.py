"""How long models take, measured so that a busy machine does not decide the answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from robustdist.core.guard import module_mode
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.recipe import compile_recipe
from robustdist.pruning.spare import spare_copy, undisturbed
from robustdist.types import check_count

__all__ = ["cpu_times", "forward_times", "latency_after"]


def cpu_times(callables: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 3) -> dict[str, float]:
    """Return the median CPU time of one call of each, in milliseconds.

    It is the time that this process computes, on one thread of torch, not time on the clock: other processes that take
    the processor away are not counted, but they do cool caches and share memory, so that figures still move by some
    percent, and only ratios within one call mean something. Calls take turns, so that drifts hit all alike. A thread
    pool of another library, or a second Python thread that computes meanwhile, is counted in. It says nothing about
    several threads or a GPU.

    Args:
        callables: Name -> function without arguments.
        rounds: Measured calls of each.
        warmup: Calls of each before.

    Raises:
        UsageError: If ``rounds`` is no count.
    """
    check_count(rounds, "rounds")
    threads = torch.get_num_threads()
    times: dict[str, list[float]] = {name: [] for name in callables}
    try:
        torch.set_num_threads(1)
        for call in callables.values():
            for _ in range(warmup):
                call()
        for _ in range(rounds):
            for name, call in callables.items():
                start = time.process_time()
                call()
                times[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def forward_times(
    models: Mapping[str, nn.Module],
    example: Tensor,
    *,
    batch_sizes: Sequence[int] = (1, 32),
    rounds: int = 15,
    warmup: int = 3,
) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a forward pass of each model, in eval mode, by batch size; see :func:`cpu_times`.

    Args:
        models: Name -> module on the CPU that takes one tensor; modes are put back.
        example: Inputs of shape (batch, ...), repeated or cut to each batch size.
        batch_sizes: Batch sizes.
        rounds: Measured calls of each model and batch size.
        warmup: Calls of each before.
    """
    calls: dict[str, Callable[[], object]] = {}
    keys = {}
    for size in batch_sizes:
        check_count(size, "batch_sizes")
        batch = example.repeat(-(-size // len(example)), *[1] * (example.dim() - 1))[:size]
        for name, model in models.items():
            key = f"{name} {size}"
            calls[key] = lambda model=model, batch=batch: model(batch)  # type: ignore[misc]
            keys[key] = name, size
    with ExitStack() as stack, torch.inference_mode():
        for model in models.values():
            stack.enter_context(module_mode(model, "eval"))
        found = cpu_times(calls, rounds=rounds, warmup=warmup)
    result: dict[str, dict[int, float]] = {name: {} for name in models}
    for key, (name, size) in keys.items():
        result[name][size] = found[key]
    return result


def latency_after(
    module: nn.Module, groups: Sequence[UnitGroup], run: Callable[[nn.Module], object]
) -> Callable[[Mapping[str, Sequence[int]]], float]:
    """Return what measures the milliseconds of ``run`` after a removal, on a copy; see :func:`cpu_times`.

    For :func:`~robustdist.pruning.selection.select`.

    Args:
        module: The dense module; its weights do not matter.
        groups: Groups of its units.
        run: Calls a module once, on the CPU, on the input that is to be measured.
    """

    def measure(removed: Mapping[str, Sequence[int]]) -> float:
        with undisturbed(), torch.no_grad():
            small = spare_copy(module).cpu()
            compile_recipe(small, groups, removed).apply(small)
            return cpu_times({"small": lambda: run(small)})["small"]

    return measure
