"""Which sample of a data set a process sees at which place, so that each is counted once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from robustdist.core.guard import forked_rng

__all__ = ["Shard", "fingerprint", "flatten_loaders", "shard_of"]

_FRAMEWORKS = ("torch", "lightning", "lightning_fabric", "pytorch_lightning")


@dataclass(frozen=True)
class Shard:
    """Maps the place of a sample in this process's stream to its place in the whole data set.

    Attributes:
        stride: Distance between two neighbours of this stream in the whole.
        offset: Place of the first one.
        length: Samples in the whole; places beyond are padding. None if unknown.
        keep_every: When every process sees everything, each keeps one of ``keep_every`` samples.
        exact: Whether the mapping is known; otherwise padding cannot be told from data.
    """

    stride: int = 1
    offset: int = 0
    length: int | None = None
    keep_every: int = 1
    keep_rank: int = 0
    exact: bool = True

    def sample_ids(self, start: int, count: int) -> list[int | None]:
        """Return the ids of ``count`` samples from place ``start`` on; None for one that is not to be counted here."""
        ids: list[int | None] = []
        for place in range(start, start + count):
            position = place * self.stride + self.offset
            padding = self.length is not None and position >= self.length
            elsewhere = place % self.keep_every != self.keep_rank
            ids.append(None if padding or elsewhere else position)
        return ids


def shard_of(loader: Any, rank: int, world_size: int) -> Shard:
    """Return how ``loader`` spreads its data set over the processes.

    Distributed samplers (Lightning injects one) hand out every ``num_replicas``-th sample and repeat the first ones to
    make the shares equal. Without one, processes that walk through the same sequence share the work here: whether it is
    the same, the caller has to find out (:func:`fingerprint`). Samplers of other origin may do anything: their mapping
    is not exact.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    # a loader with a batch sampler has a `sampler` too, which it does not use
    sampler = getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)
    if batch_sampler is not None and sampler is None:
        return Shard(stride=world_size, offset=rank, exact=False)  # batches of the user's own making
    if isinstance(sampler, DistributedSampler) and _comes_from_a_framework(sampler):
        return Shard(stride=sampler.num_replicas, offset=sampler.rank, length=len(sampler.dataset))  # type: ignore[arg-type]
    if isinstance(sampler, SequentialSampler):
        return Shard(keep_every=world_size, keep_rank=rank)
    if world_size == 1 and (_draws_each_once(sampler) or isinstance(getattr(loader, "dataset", None), IterableDataset)):
        return Shard()
    return Shard(stride=world_size, offset=rank, exact=False)


def fingerprint(loader: Any) -> int:
    """Return a number that tells the data sets of two processes apart: from its length, first and last sample.

    0 for a data set without length or places.
    """
    dataset = getattr(loader, "dataset", None)
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0
    with forked_rng(torch.device("cpu"), 0):  # a random transform draws the same on every process, and nothing outside
        ends = [dataset[place] for place in sorted({0, size - 1})] if size and dataset is not None else []
    digest = hashlib.blake2b(str(size).encode(), digest_size=7)
    for leaf in _leaves(ends):
        digest.update(leaf.cpu().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big")


def _draws_each_once(sampler: Any) -> bool:
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return sampler is None or isinstance(sampler, SubsetRandomSampler)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _comes_from_a_framework(sampler: DistributedSampler[Any]) -> bool:
    # subclasses of other people give out contiguous blocks, repeat samples or balance classes
    return type(sampler).__iter__.__module__.split(".")[0] in _FRAMEWORKS


def flatten_loaders(loaders: Any) -> list[Any]:
    """Return the loaders inside a list, tuple or mapping of loaders, in order."""
    if isinstance(loaders, Mapping):
        return [loader for value in loaders.values() for loader in flatten_loaders(value)]
    if isinstance(loaders, Sequence):
        return [loader for value in loaders for loader in flatten_loaders(value)]
    return [loaders]
