"""``robustdist bench``: the commands behind the figures in the docs."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import auto_cli

from robustdist.bench import (
    bench_attack,
    bench_auto_attack,
    bench_comm,
    bench_comm_accuracy,
    bench_comm_train,
    bench_learners,
    bench_objectives,
    bench_prune,
    bench_prune_accuracy,
    bench_prune_text,
    bench_text,
)

__all__ = ["run_bench"]


def run_bench(args: Sequence[str]) -> None:
    """Run one benchmark; arguments as in its function."""
    auto_cli(
        {
            "attack": bench_attack,
            "autoattack": bench_auto_attack,
            "comm": bench_comm,
            "comm_accuracy": bench_comm_accuracy,
            "comm_train": bench_comm_train,
            "learners": bench_learners,
            "objectives": bench_objectives,
            "prune": bench_prune,
            "prune_accuracy": bench_prune_accuracy,
            "prune_text": bench_prune_text,
            "text": bench_text,
        },
        args=list(args),
        prog="robustdist bench",
        exit_on_error=False,
    )
