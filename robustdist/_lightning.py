"""The only file that imports Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` are two separate class trees, always installed together. A process
works with one of them; robustdist follows the one the user's code has already imported, and ``lightning`` otherwise.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from robustdist.errors import UsageError

__all__ = [
    "PACKAGE",
    "Callback",
    "DDPStrategy",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningDataModule",
    "LightningModule",
    "ModelCheckpoint",
    "ModelPruning",
    "MultiProcessingLauncher",
    "SaveConfigCallback",
    "StochasticWeightAveraging",
    "StrategyRegistry",
    "Trainer",
    "WeightAveraging",
    "check_same_package",
    "rank_zero_debug",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
]

_FOLLOW_OTHER = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
PACKAGE = "pytorch_lightning" if _FOLLOW_OTHER else "lightning.pytorch"

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ModelPruning,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_only, rank_zero_warn
else:
    _root = importlib.import_module(PACKAGE)
    _rank_zero = importlib.import_module(f"{PACKAGE}.utilities.rank_zero")
    _cli = importlib.import_module(f"{PACKAGE}.cli")
    Callback = _root.Callback
    LightningArgumentParser = _cli.LightningArgumentParser
    LightningCLI = _cli.LightningCLI
    _callbacks = importlib.import_module(f"{PACKAGE}.callbacks")
    EarlyStopping = _callbacks.EarlyStopping
    GradientAccumulationScheduler = _callbacks.GradientAccumulationScheduler
    ModelCheckpoint = _callbacks.ModelCheckpoint
    ModelPruning = _callbacks.ModelPruning
    SaveConfigCallback = _cli.SaveConfigCallback
    _strategies = importlib.import_module(f"{PACKAGE}.strategies")
    DDPStrategy = _strategies.DDPStrategy
    StrategyRegistry = _strategies.StrategyRegistry
    MultiProcessingLauncher = _strategies.launchers._MultiProcessingLauncher
    StochasticWeightAveraging = _callbacks.StochasticWeightAveraging
    WeightAveraging = _callbacks.WeightAveraging
    LightningDataModule = _root.LightningDataModule
    LightningModule = _root.LightningModule
    Trainer = _root.Trainer
    seed_everything = _root.seed_everything
    rank_zero_debug = _rank_zero.rank_zero_debug
    rank_zero_info = _rank_zero.rank_zero_info
    rank_zero_only = _rank_zero.rank_zero_only
    rank_zero_warn = _rank_zero.rank_zero_warn


def check_same_package(module: Any) -> None:
    """Refuse a module, or a class, of the other Lightning package.

    Raises:
        UsageError: If ``module`` derives from the class tree that robustdist does not follow in this process.
    """
    kind = module if isinstance(module, type) else type(module)
    if issubclass(kind, LightningModule):
        return
    other = "lightning.pytorch" if PACKAGE == "pytorch_lightning" else "pytorch_lightning"
    if any(base.__module__.split(".")[0] == other.split(".")[0] for base in kind.__mro__):
        raise UsageError(
            f"{kind.__name__} derives from {other} but robustdist works with {PACKAGE} in this process: "
            f"import everything from one of the two (write `import {PACKAGE} as pl` in the module, "
            f"or import {other} before robustdist)"
        )
