"""Labelled and unlabelled samples in one data set."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from robustdist.errors import UsageError
from robustdist.types import UNLABELED

__all__ = ["UnlabeledMix"]


class UnlabeledMix(Dataset[tuple[Any, Any]]):
    """Pairs (x, y) from two data sets, with -1 for the target of the unlabelled ones.

    The labelled samples come first, then the unlabelled ones: shuffle, so that every batch holds ``share`` of
    unlabelled samples in expectation. Length and meaning of every place are fixed, so any sampler, a distributed one
    too, may walk over it. It is as short as it can be with all samples of both in it: the data set that is too small
    for its share is repeated. Limit long epochs with the Trainer's ``limit_train_batches``.

    Args:
        labeled: Pairs (x, class).
        unlabeled: Inputs x, or tuples that begin with x.
        share: Share of unlabelled samples, in (0, 1).

    Raises:
        UsageError: If ``share`` is out of range or a data set is empty or without length.

    Example:
        >>> labeled = [(torch.zeros(2), 3), (torch.zeros(2), 1)]
        >>> mix = UnlabeledMix(labeled, [torch.ones(2)], share=0.5)
        >>> [int(y) for _, y in mix]
        [3, 1, -1, -1]
    """

    def __init__(self, labeled: Dataset[Any], unlabeled: Dataset[Any], share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise UsageError(f"share={share} must be between 0 and 1: it is the share of unlabelled samples")
        for option, dataset in (("labeled", labeled), ("unlabeled", unlabeled)):
            if not hasattr(dataset, "__len__") or len(cast(Sized, dataset)) == 0:
                raise UsageError(f"{option} must be a data set with a length of at least 1: give one with samples")
        self.labeled = labeled
        self.unlabeled = unlabeled
        self.share = share
        num_labeled, num_unlabeled = len(cast(Sized, labeled)), len(cast(Sized, unlabeled))
        # whichever lasts longer sets the length; rounded up, so that nothing of it is lost
        total = max(num_labeled / (1 - share), num_unlabeled / share)
        self.num_unlabeled = max(num_unlabeled, math.ceil(round(total * share, 6)))
        self.num_labeled = max(num_labeled, math.ceil(round(total * (1 - share), 6)))
        # of the type of the labels, or a loader could not stack the two
        label = labeled[0][1]
        self._no_label: Any = torch.full_like(label, UNLABELED) if isinstance(label, Tensor) else UNLABELED

    def __len__(self) -> int:
        """Return the number of places."""
        return self.num_labeled + self.num_unlabeled

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        """Return one pair; the target has the type of the labels."""
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} is outside of 0..{len(self) - 1}")
        if place < self.num_labeled:
            x, y = self.labeled[place % len(cast(Sized, self.labeled))]
            return x, y
        sample = self.unlabeled[(place - self.num_labeled) % len(cast(Sized, self.unlabeled))]
        return (sample[0] if isinstance(sample, (tuple, list)) else sample), self._no_label
