"""Structured pruning: units really removed, identically everywhere, and rebuilt from a recipe."""

from robustdist.pruning.groups import Kind, Member, Role, UnitAttribute, UnitGroup

__all__ = ["Kind", "Member", "Role", "UnitAttribute", "UnitGroup"]
