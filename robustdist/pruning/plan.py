"""What would be removed, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from robustdist.errors import UsageError
from robustdist.pruning.cost import Cost, CostModel
from robustdist.pruning.groups import Kind, UnitGroup
from robustdist.pruning.projections import is_below
from robustdist.pruning.selection import Removed, Target
from robustdist.pruning.untraceable import covers

__all__ = ["PlannedGroup", "PruningPlan", "chosen_groups", "whole_by"]


@dataclass(frozen=True)
class PlannedGroup:
    """One group of a plan.

    Attributes:
        name: Path of the layer that makes the units, as in ``ignore``.
        kind: What a unit is.
        size: Units there are.
        kept: Units that stay.
        members: Tensors with the dimension that shrinks, ``layer1.0.conv1.weight[0]``.
        rule: Why the group stays whole; empty if it does not.
        layers: Of kind "layers": paths of the blocks that go.
    """

    name: str
    kind: Kind
    size: int
    kept: int
    members: tuple[str, ...]
    rule: str = ""
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class PruningPlan:
    """What a pruning would leave.

    Attributes:
        model: Class name.
        target: What was asked for.
        groups: All groups, those that stay whole too.
        dense: Cost of the model as it is; multiply-accumulates of one sample.
        small: Cost of what is left.
        refused: Path of a layer -> why its units have to stay.
        scores: What the units were ranked by.
    """

    model: str
    target: Target
    groups: tuple[PlannedGroup, ...]
    dense: Cost
    small: Cost
    refused: Mapping[str, str] = field(default_factory=dict)
    scores: str = "magnitude"

    @classmethod
    def of(
        cls,
        model: str,
        target: Target,
        found: Sequence[UnitGroup],
        removed: Removed,
        cost: CostModel,
        *,
        rules: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> PruningPlan:
        """Put a plan together.

        Args:
            model: Class name.
            target: What was asked for.
            found: All groups of the model.
            removed: Units that would go.
            cost: Of the groups that take part, counted on one sample.
            rules: Group -> why it stays whole.
            refused: As from :func:`robustdist.pruning.discover`.
        """
        rules = rules or {}
        gone = [group.layers[unit] for group in found if group.layers for unit in removed.get(group.name, ())]
        groups = tuple(_planned(group, removed.get(group.name, ()), rules, gone) for group in found)
        return cls(model, target, groups, cost.dense, cost.of(removed), dict(refused or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "model": self.model,
            "target": dict(self.target.shape) or {self.target.name: self.target.value},
            "scores": self.scores,
            "groups": [
                {**vars(group), "members": list(group.members), "layers": list(group.layers)} for group in self.groups
            ],
            "dense": vars(self.dense).copy(),
            "small": vars(self.small).copy(),
            "refused": dict(self.refused),
        }


def _planned(group: UnitGroup, units: Sequence[int], rules: Mapping[str, str], gone: Sequence[str]) -> PlannedGroup:
    around = next((p for p in gone if group.members and all(is_below(m.tensor, p) for m in group.members)), "")
    rule = "" if units else rules.get(group.name, "its units score above the threshold")
    return PlannedGroup(
        group.name,
        group.kind,
        group.size,
        0 if around else group.size - len(units),
        tuple(f"{member.tensor}[{member.dim}]" for member in group.members),
        f"goes with {around}" if around else rule,
        tuple(group.layers[unit] for unit in units) if group.layers else (),
    )


def chosen_groups(
    found: Sequence[UnitGroup], ignore: Sequence[str] = (), refused: Iterable[str] = ()
) -> list[UnitGroup]:
    """Return the groups that may lose units.

    Args:
        found: All groups of the model.
        ignore: Patterns of names of groups that stay whole, or of parts that cannot be pruned.
        refused: Paths of these parts.

    Raises:
        UsageError: If a pattern matches nothing, or nothing is left.
    """
    for pattern in ignore:
        matches = any(fnmatch(group.name, pattern) for group in found)
        if not matches and not any(covers([pattern], path) for path in refused):
            names = ", ".join(group.name for group in found[:8])
            raise UsageError(f"ignore={pattern!r} matches no group: they are {names}")
    groups = [group for group in found if not any(fnmatch(group.name, pattern) for pattern in ignore)]
    if not groups:
        raise UsageError(f"ignore={list(ignore)} leaves no group to prune: drop a pattern")
    return groups


def whole_by(
    found: Sequence[UnitGroup],
    target: Target,
    *,
    ignore: Sequence[str] = (),
    round_to: int = 1,
    min_units: int = 1,
) -> dict[str, str]:
    """Return the groups that stay whole whatever their scores are, by name, and the rule that says so."""
    rules = {}
    for group in found:
        patterns = [pattern for pattern in ignore if fnmatch(group.name, pattern)]
        step = round_to if group.kind not in ("heads", "layers") and group.size > round_to else 1
        if patterns:
            rules[group.name] = f"ignore={patterns[0]!r}"
        elif target.name == "shape" and group.kind not in target.shape:
            rules[group.name] = f"target names no {group.kind}"
        elif target.name == "shape":
            rules[group.name] = f"target {group.kind}={target.shape[group.kind]}"
        elif group.size <= min_units:
            rules[group.name] = f"min_units={min_units}"
        elif target.name == "width":
            rules[group.name] = f"width {target.value:g} of {group.size}, round_to={step}"
    return rules
