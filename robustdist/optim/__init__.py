"""Optimisers, usable alone and from YAML."""

from robustdist.optim.lalr import LALR

__all__ = ["LALR"]
