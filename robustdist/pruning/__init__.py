"""Structured pruning: units really removed, identically everywhere, and rebuilt from a recipe."""

from robustdist.pruning.discovery import discover
from robustdist.pruning.groups import Kind, Member, Role, UnitAttribute, UnitGroup
from robustdist.pruning.loading import RECIPE_KEY, load_pruned, pruned_loading
from robustdist.pruning.masks import UnitMasks
from robustdist.pruning.optimizer import optimizers_follow
from robustdist.pruning.recipe import PruningRecipe, compile_recipe
from robustdist.pruning.tracing import traced_groups
from robustdist.pruning.transformers import droppable_layers, transformer_groups

__all__ = [
    "RECIPE_KEY",
    "Kind",
    "Member",
    "PruningRecipe",
    "Role",
    "UnitAttribute",
    "UnitGroup",
    "UnitMasks",
    "compile_recipe",
    "discover",
    "droppable_layers",
    "load_pruned",
    "optimizers_follow",
    "pruned_loading",
    "traced_groups",
    "transformer_groups",
]
