"""Structured pruning: units really removed, identically everywhere, and rebuilt from a recipe."""

from robustdist.pruning.cost import Cost, CostModel
from robustdist.pruning.discovery import discover
from robustdist.pruning.distillation import distilled
from robustdist.pruning.gates import Gates, LearnedScores, fold
from robustdist.pruning.groups import Kind, Member, Role, UnitAttribute, UnitGroup
from robustdist.pruning.hard_concrete import LearnedMasks
from robustdist.pruning.importance import Criterion, make_criterion, slimming_penalty
from robustdist.pruning.loading import RECIPE_KEY, load_pruned, pruned_loading
from robustdist.pruning.masks import UnitMasks
from robustdist.pruning.optimizer import optimizers_follow
from robustdist.pruning.recipe import PruningRecipe, compile_recipe
from robustdist.pruning.schedule import PruningSchedule
from robustdist.pruning.selection import Target, select
from robustdist.pruning.tracing import traced_groups
from robustdist.pruning.transformers import droppable_layers, transformer_groups

__all__ = [
    "RECIPE_KEY",
    "Cost",
    "CostModel",
    "Criterion",
    "Gates",
    "Kind",
    "LearnedMasks",
    "LearnedScores",
    "Member",
    "PruningRecipe",
    "PruningSchedule",
    "Role",
    "Target",
    "UnitAttribute",
    "UnitGroup",
    "UnitMasks",
    "compile_recipe",
    "discover",
    "distilled",
    "droppable_layers",
    "fold",
    "load_pruned",
    "make_criterion",
    "optimizers_follow",
    "pruned_loading",
    "select",
    "slimming_penalty",
    "traced_groups",
    "transformer_groups",
]
