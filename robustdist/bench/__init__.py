"""Benchmarks behind the figures in the documentation: ``robustdist bench``."""

from robustdist.bench.attack import bench_attack
from robustdist.bench.auto_attack import bench_auto_attack
from robustdist.bench.objectives import bench_objectives
from robustdist.bench.text import bench_text

__all__ = ["bench_attack", "bench_auto_attack", "bench_objectives", "bench_text"]
