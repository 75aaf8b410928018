"""Benchmarks behind the figures in the documentation: ``robustdist bench``."""

from robustdist.bench.attack import bench_attack
from robustdist.bench.objectives import bench_objectives

__all__ = ["bench_attack", "bench_objectives"]
