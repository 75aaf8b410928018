"""Which classes a multi-target attack aims at."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["other_classes"]


def other_classes(logits: Tensor, y: Tensor, num_targets: int) -> Tensor:
    """Return per row the classes other than ``y`` with the largest logits, largest first.

    Args:
        logits: Shape (batch, classes).
        y: Own classes, shape (batch,).
        num_targets: How many classes; fewer are returned where there are fewer.

    Returns:
        Shape (batch, min(num_targets, classes - 1)).
    """
    others = logits.scatter(1, y.long()[:, None], -torch.inf)
    num_targets = min(num_targets, logits.shape[1] - 1)
    return others.argsort(dim=1, descending=True, stable=True)[:, :num_targets]
