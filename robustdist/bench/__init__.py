"""Benchmarks behind the figures in the documentation: ``robustdist bench``."""

from robustdist.bench.attack import bench_attack

__all__ = ["bench_attack"]
