"""Optimisers, usable alone and from YAML."""

from robustdist.optim.lalr import LALR
from robustdist.optim.one_bit_adam import OneBitAdam

__all__ = ["LALR", "OneBitAdam"]
