"""What all data modules share: splitting, scaling, loaders. A data set writes ``load`` and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from robustdist._lightning import LightningDataModule
from robustdist.errors import UsageError

__all__ = ["ImageDataModule", "Parts", "as_dataset", "stratified_split"]


class Parts(NamedTuple):
    """The three parts of a data set, each of pairs (image, label)."""

    train: TensorDataset
    val: TensorDataset
    test: TensorDataset


class ImageDataModule(LightningDataModule, ABC):
    """Base of the data modules: float32 images in [0, 1] of shape (batch, channels, height, width), int64 labels.

    Everything is read at the first use and kept in this instance. Only the training loader shuffles, in an order that
    follows the global seed as with any ``DataLoader``; ``seed`` decides who belongs to which part.

    Args:
        batch_size: Images per batch and process.
        num_workers: Worker processes per loader; 0 is fastest for data that lies in memory.
        seed: Seed of the split.

    Raises:
        UsageError: If an argument is out of range.
    """

    num_classes: ClassVar[int]
    #: Channels, height, width.
    input_shape: ClassVar[tuple[int, int, int]]

    def __init__(self, batch_size: int = 100, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        for option, value, smallest in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if value < smallest:
                raise UsageError(f"{option}={value} must be at least {smallest}")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._parts: Parts | None = None

    @abstractmethod
    def load(self) -> Parts:
        """Read the data and return the three parts; called once per instance.

        Raises:
            UsageError: If the data is not there; the message says how to get it.
        """

    @property
    def parts(self) -> Parts:
        """The three parts, read now if they have not been."""
        if self._parts is None:
            self._parts = self.load()
        return self._parts

    def setup(self, stage: str | None = None) -> None:
        """Read the data; the same parts serve every stage."""
        _ = self.parts

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader over the training part, shuffled anew in every epoch."""
        return self._loader(self.parts.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader over the validation part, always in the same order."""
        return self._loader(self.parts.val)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader over the test part, always in the same order."""
        return self._loader(self.parts.test)

    def _loader(self, dataset: TensorDataset, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def as_dataset(images: Tensor, labels: Tensor, *, white: float) -> TensorDataset:
    """Return pairs of float32 images in [0, 1] and int64 labels.

    Args:
        images: Shape (count, channels, height, width), values from 0 to ``white``.
        labels: Shape (count,), integers.
        white: The value that becomes 1.
    """
    return TensorDataset(images.to(torch.float32) / white, labels.to(torch.int64))


def stratified_split(labels: Tensor, sizes: Sequence[int], *, seed: int) -> list[Tensor]:
    """Split row numbers into disjoint parts that all have the class shares of ``labels``.

    The rows of every class are shuffled and spread evenly over one common order, which is then cut. So every beginning
    of a part is stratified too: the first 500 test images are as good a sample as any. Rows beyond the sum of ``sizes``
    are left out.

    Args:
        labels: Class of every row, shape (rows,).
        sizes: Rows per part.
        seed: Seed of the shuffle; the global random state is neither read nor changed.

    Returns:
        One tensor of row numbers per part; in each, a class count differs from its exact share by less than two.

    Raises:
        UsageError: If a size is negative or there are too few rows.

    Example:
        >>> [len(part) for part in stratified_split(torch.tensor([0, 0, 0, 1, 1, 1]), [4, 2], seed=0)]
        [4, 2]
    """
    if min(sizes) < 0 or sum(sizes) > len(labels):
        raise UsageError(f"parts of {', '.join(map(str, sizes))} rows cannot be cut from {len(labels)} rows")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    position = torch.empty(len(labels), dtype=torch.float64)
    for label in set(labels.tolist()):
        (own,) = torch.where(labels[order] == label)
        position[own] = (torch.arange(len(own), dtype=torch.float64) + 0.5) / len(own)
    order = order[position.argsort(stable=True)]
    return [order[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
