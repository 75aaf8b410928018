"""Cuts a module in the middle of a fit, and takes along everything that has the shape of its parameters."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from robustdist._lightning import (
    Callback,
    DDPStrategy,
    LightningModule,
    MultiProcessingLauncher,
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
    rank_zero_info,
    rank_zero_warn,
)
from robustdist.callbacks.learner_tuning import LearnerTuning
from robustdist.core.compiled import forget_compiled
from robustdist.core.ranks import gathered
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning import PruningRecipe, optimizers_follow
from robustdist.pruning.surgery import check_no_graph_is_held

__all__ = [
    "averaged_modules",
    "averages_of",
    "check_all_can_follow",
    "check_hashes",
    "check_optimizers_can_follow",
    "cut_in_fit",
]


def cut_in_fit(trainer: Trainer, module: LightningModule, recipe: PruningRecipe) -> None:
    """Carry ``recipe`` out on ``module`` between two optimiser steps, on all ranks together.

    Parameters keep their identity. The state of optimisers, averaged copies of the module, the residuals of compressed
    communication and what other callbacks keep (those with a method ``follow_pruning(recipe)``) are cut alike; DDP,
    which remembers old shapes, wraps the module anew and gets its communication hook again. Sizes are told, and
    optimiser state that could not be cut and starts anew is warned about.

    Raises:
        UsageError: If somebody holds on to a gradient graph with the old shapes, or ranks have different recipes.
    """
    strategy: Any = trainer.strategy
    check_hashes(recipe)
    shapes, before = {name: parameter.shape for name, parameter in module.named_parameters()}, _size(module)
    wrapped = isinstance(strategy, DDPStrategy) and strategy.model is not module
    if wrapped:
        strategy.model = module
        gc.collect()  # DDP is in a cycle with its own hooks; while it lives, so do the graph nodes with the old shapes
    recipe.apply(module)
    forget_compiled(module)
    check_no_graph_is_held(module)
    reset = optimizers_follow(trainer.optimizers, module, recipe, shapes)
    for average in averaged_modules(trainer):
        recipe.apply(average)
    if hasattr(strategy, "map_residuals"):
        strategy.map_residuals(recipe.slice_like)
    for callback in _callbacks(trainer):
        follow = getattr(callback, "follow_pruning", None)
        if callable(follow):
            follow(recipe)
    if wrapped:
        strategy.configure_ddp()
    after = _size(module)
    rank_zero_info(
        f"StructuredPruning: {before:,} -> {after:,} parameters ({after / before - 1:+.1%}) "
        f"at global step {trainer.global_step}"
    )
    if reset:
        rank_zero_warn(
            f"the optimiser's state of {len(reset)} parameters ({reset[0]}, ...) is factored and starts anew",
            category=RobustDistWarning,
        )


def averages_of(trainer: Trainer) -> list[AveragedModel]:
    """Return the averages that Lightning's callbacks keep of the module."""
    models = [callback._average_model for callback in _callbacks(trainer) if isinstance(callback, WeightAveraging)]
    return [model for model in models if model is not None]


def averaged_modules(trainer: Trainer) -> list[nn.Module]:
    """Return the averaged copies that Lightning's callbacks keep of the module."""
    return [average.module for average in averages_of(trainer)]


def check_hashes(recipe: PruningRecipe) -> None:
    """Compare the recipes of all ranks.

    Raises:
        UsageError: On all of them, if two differ.
    """
    hashes = gathered(recipe.hash())
    others = [str(rank) for rank, found in enumerate(hashes) if found != hashes[0]]
    if others:
        error = UsageError(
            f"rank {', '.join(others)} would prune other units than rank 0: build the same model on all ranks"
        )
        error.shared = True
        raise error


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _callbacks(trainer: Any) -> list[Callback]:
    return list(trainer.callbacks)


def check_all_can_follow(trainer: Trainer) -> None:
    """Refuse what could not go on with a smaller module.

    Raises:
        UsageError: For forked and spawned training whose main process loads the weights without knowing the structure,
            and for averages that nobody can cut.
    """
    if any(isinstance(callback, StochasticWeightAveraging) for callback in _callbacks(trainer)):
        raise UsageError(
            "StructuredPruning: the copy that StochasticWeightAveraging keeps cannot follow a removal: use "
            "EMAWeightAveraging, or removal='never'"
        )
    if any(isinstance(callback, LearnerTuning) for callback in _callbacks(trainer)):
        raise UsageError(
            "StructuredPruning and LearnerTuning do not go together in one fit: prune first, load the small module "
            "with load_pruned, and tune that"
        )
    launcher: Any = trainer.strategy.launcher
    if isinstance(launcher, MultiProcessingLauncher) and not getattr(launcher, "follows_structure", False):
        raise UsageError(
            "StructuredPruning: the main process of forked or spawned training could not load the small module: use "
            "strategy='robust_ddp_fork', 'robust_ddp_spawn' or 'ddp', or removal='never'"
        )


def check_optimizers_can_follow(trainer: Trainer) -> None:
    """Refuse optimisers that remember all parameters as one vector.

    Raises:
        UsageError: For LBFGS.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise UsageError(
            "StructuredPruning: LBFGS remembers one vector of all parameters, which cannot be cut: use Adam"
        )
