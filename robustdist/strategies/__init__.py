"""Strategies for the Trainer; importing this package makes their names known to it."""

from robustdist.strategies.compressed_ddp import CompressedDDPStrategy
from robustdist.strategies.launchers import RobustDDPStrategy
from robustdist.strategies.quantized_data import QuantizedDataStrategy
from robustdist.strategies.registration import register_strategies

__all__ = ["CompressedDDPStrategy", "QuantizedDataStrategy", "RobustDDPStrategy"]

register_strategies()
