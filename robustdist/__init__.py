"""Adversarial training, compressed communication and structured pruning for unmodified LightningModules."""

from robustdist.errors import RobustDistWarning, UsageError

__version__ = "0.1.0"
__all__ = ["RobustDistWarning", "UsageError", "__version__"]
