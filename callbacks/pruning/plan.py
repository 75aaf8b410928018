"""What StructuredPruning would remove, told before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from robustdist.callbacks.pruning.example import example_of, forward_of
from robustdist.core.snapshot import on_cpu
from robustdist.pruning import discover
from robustdist.pruning.cost import CostModel
from robustdist.pruning.example import with_rows
from robustdist.pruning.importance import Magnitude, named_tensors
from robustdist.pruning.latency import latency_after
from robustdist.pruning.plan import PruningPlan, chosen_groups, whole_by
from robustdist.pruning.selection import select

if TYPE_CHECKING:
    from robustdist.callbacks.structured_pruning import StructuredPruning

__all__ = ["plan_of"]


def plan_of(pruning: StructuredPruning, module: nn.Module, batch: Any) -> PruningPlan:
    """Return what ``pruning`` would find in ``module`` and leave of it, by the magnitude of its present weights.

    Args:
        pruning: The callback with its options.
        module: The dense module, which is not touched.
        batch: A batch of the training data.

    Raises:
        UsageError: Of discovery and selection, as at the first batch of a fit.
    """
    example, forward = example_of(module, batch, pruning.input_key), forward_of(pruning.forward)
    refused: dict[str, str] = {}
    found = discover(module, example, forward=forward, kinds=pruning.kinds, ignore=pruning.ignore, refused=refused)
    groups = chosen_groups(found, pruning.ignore, refused)
    tensors = named_tensors(module)
    criterion = Magnitude()
    cost = CostModel(module, groups, lambda: forward(module, with_rows(example, 1)))
    removed = select(
        groups,
        {group.name: criterion.score(group, tensors) for group in groups},
        target=pruning.target,
        cost=cost,
        latency=latency_after(module, groups, lambda net: forward(net, on_cpu(with_rows(example, 1)))),
        uniform=pruning.uniform,
        round_to=pruning.round_to,
        min_units=pruning.min_units,
    )
    rules = whole_by(
        found,
        pruning.target,
        ignore=pruning.ignore,
        round_to=pruning.round_to,
        min_units=pruning.min_units,
    )
    return PruningPlan.of(
        type(module).__name__,
        pruning.target,
        found,
        removed,
        cost,
        rules=rules,
        refused=refused,
    )
