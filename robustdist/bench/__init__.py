"""Benchmarks: the commands behind the figures in the docs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from robustdist.bench.attack import bench_attack
from robustdist.bench.comm import bench_comm

if TYPE_CHECKING:
    from robustdist.bench.auto_attack import bench_auto_attack
    from robustdist.bench.comm_accuracy import bench_comm_accuracy
    from robustdist.bench.comm_train import bench_comm_train
    from robustdist.bench.learners import bench_learners
    from robustdist.bench.objectives import bench_objectives
    from robustdist.bench.prune import bench_prune
    from robustdist.bench.prune_accuracy import bench_prune_accuracy
    from robustdist.bench.prune_text import bench_prune_text
    from robustdist.bench.text import bench_text

__all__ = [
    "bench_attack",
    "bench_auto_attack",
    "bench_comm",
    "bench_comm_accuracy",
    "bench_comm_train",
    "bench_learners",
    "bench_objectives",
    "bench_prune",
    "bench_prune_accuracy",
    "bench_prune_text",
    "bench_text",
]

_NEED_LIGHTNING = {
    "bench_auto_attack": "auto_attack",
    "bench_comm_accuracy": "comm_accuracy",
    "bench_comm_train": "comm_train",
    "bench_learners": "learners",
    "bench_objectives": "objectives",
    "bench_prune": "prune",
    "bench_prune_accuracy": "prune_accuracy",
    "bench_prune_text": "prune_text",
    "bench_text": "text",
}


def __getattr__(name: str) -> Any:
    """Import what trains through a Trainer when it is asked for: Lightning takes seconds to load."""
    if name not in _NEED_LIGHTNING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_LIGHTNING[name]}"), name)
