"""Strategies by the names that people give to the Trainer."""

from __future__ import annotations

from robustdist._lightning import StrategyRegistry
from robustdist.strategies.compressed_ddp import CompressedDDPStrategy
from robustdist.strategies.launchers import RobustDDPStrategy
from robustdist.strategies.quantized_data import QuantizedDataStrategy

__all__ = ["register_strategies"]

#: Names of strategies; with "_fork" and "_spawn" for the other ways to start processes, as Lightning names its own.
STRATEGIES = {
    "ddp_compressed": CompressedDDPStrategy,
    "ddp_quantized_data": QuantizedDataStrategy,
    "robust_ddp": RobustDDPStrategy,
}


def register_strategies() -> None:
    """Register every strategy under its name with Lightning."""
    for name, kind in STRATEGIES.items():
        for suffix, start_method in (("", "popen"), ("_fork", "fork"), ("_spawn", "spawn")):
            StrategyRegistry.register(
                name + suffix,
                kind,
                description=f"{kind.__name__} with start_method '{start_method}'",
                override=True,
                start_method=start_method,
            )
