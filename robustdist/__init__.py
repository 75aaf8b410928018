"""Adversarial training, compressed communication and structured pruning for unmodified LightningModules."""

import sys

from robustdist.errors import RobustDistWarning, UsageError

__version__ = "0.1.0"
__all__ = ["RobustDistWarning", "UsageError", "__version__"]

# the Trainer shall know our strategies by name, and whoever works without Lightning shall not wait for it
if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
    import robustdist.strategies  # noqa: F401
