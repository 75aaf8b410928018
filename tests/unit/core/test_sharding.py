"""Every sample of a data set is counted once, whatever hands the samples out."""

from __future__ import annotations

import importlib
import itertools
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data._utils.collate import default_collate

from robustdist.core.sharding import Shard, fingerprint, flatten_loaders, shard_of

WORLDS = (1, 2, 3, 4)
SIZES = range(1, 13)
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class Positions(torch.utils.data.Dataset):
    """A data set whose samples are their positions."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError
        return index


def counted(loaders: list[DataLoader]) -> tuple[list[int], list[int], bool]:
    """The ids and the data set positions that all processes together count, and whether that is said to be exact."""
    ids, positions, exact = [], [], True
    for rank, loader in enumerate(loaders):
        shard = shard_of(loader, rank, len(loaders))
        exact &= shard.exact
        place = 0
        for batch in loader:  # as the callback does it: batch by batch
            for sample_id, position in zip(shard.sample_ids(place, len(batch)), batch.tolist(), strict=True):
                if sample_id is not None:
                    ids.append(sample_id)
                    positions.append(position)
            place += len(batch)
    return ids, positions, exact


def check_once(loaders: list[DataLoader], expected: list[int], *, ordered: bool) -> None:
    ids, positions, exact = counted(loaders)
    assert sorted(positions) == expected
    assert sorted(ids) == list(range(len(expected)))
    assert exact
    if ordered:
        assert ids == positions


def loader(length: int, sampler: Any, **kwargs: Any) -> DataLoader:
    return DataLoader(Positions(length), batch_size=2, sampler=sampler, **kwargs)


def wrapper(package: str, name: str) -> Any:
    place = f"{package}.overrides.distributed"
    if name == "DistributedSamplerWrapper":
        place = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[package]
        place += ".utilities.distributed"
    return getattr(importlib.import_module(place), name)


# --- torch's own sampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_distributed_sampler_counts_every_sample_once(world_size, shuffle, drop_last):
    for length in SIZES:
        loaders = [
            loader(length, DistributedSampler(Positions(length), world_size, rank, shuffle, 3, drop_last))
            for rank in range(world_size)
        ]
        for epoch in (0, 1):
            for each in loaders:
                each.sampler.set_epoch(epoch)
            order = list(range(length))
            if shuffle:
                order = torch.randperm(length, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
            kept = length - length % world_size if drop_last else length  # what the sampler drops on purpose
            ids, positions, exact = counted(loaders)
            assert exact
            assert sorted(ids) == list(range(kept)), (length, epoch)
            assert [order[sample_id] for sample_id in ids] == positions, (length, epoch)


def test_padding_is_what_is_left_out():
    # five samples on four processes: eight are handed out
    samplers = [DistributedSampler(Positions(5), 4, rank, shuffle=False) for rank in range(4)]
    ids = [shard_of(loader(5, sampler), rank, 4).sample_ids(0, 2) for rank, sampler in enumerate(samplers)]
    assert ids == [[0, 4], [1, None], [2, None], [3, None]]


def test_the_samplers_own_world_counts_not_the_trainers():
    sampler = DistributedSampler(Positions(6), num_replicas=3, rank=2, shuffle=False)
    assert shard_of(loader(6, sampler), rank=0, world_size=1).sample_ids(0, 2) == [2, 5]


def test_drop_last_of_the_loader_loses_only_its_last_batch():
    loaders = [loader(9, DistributedSampler(Positions(9), 2, rank, shuffle=False), drop_last=True) for rank in range(2)]
    ids, positions, exact = counted(loaders)
    assert (sorted(ids), ids == positions, exact) == (list(range(8)), True, True)


# --- Lightning's samplers, of both packages


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_unrepeated_samplers_count_every_sample_once(package, world_size, shuffle):
    plain, wrapped = (wrapper(package, f"UnrepeatedDistributedSampler{end}") for end in ("", "Wrapper"))
    for length in range(world_size, 13):
        kwargs = {"num_replicas": world_size, "shuffle": shuffle}
        ranks = range(world_size)
        loaders = [loader(length, plain(Positions(length), rank=rank, **kwargs)) for rank in ranks]
        check_once(loaders, list(range(length)), ordered=not shuffle)
        inner = [reordered(length) for _ in ranks]
        loaders = [loader(length, wrapped(inner[rank], rank=rank, **kwargs)) for rank in ranks]
        check_once(loaders, list(range(length)), ordered=False)


def reordered(length: int) -> Sampler:
    return RandomSampler(Positions(length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_wrapper_around_any_sampler_counts_every_sample_once(package, world_size, drop_last):
    wrapped = wrapper(package, "DistributedSamplerWrapper")
    for length, shuffled in itertools.product(SIZES, (False, True)):
        inner = [reordered(length) if shuffled else SequentialSampler(Positions(length)) for _ in range(world_size)]
        loaders = [
            loader(length, wrapped(sampler, num_replicas=world_size, rank=rank, shuffle=False, drop_last=drop_last))
            for rank, sampler in enumerate(inner)
        ]
        kept = length - length % world_size if drop_last else length
        expected = sorted(list(reordered(length))[:kept]) if shuffled else list(range(kept))
        ids, positions, exact = counted(loaders)
        assert exact
        assert sorted(ids) == list(range(kept))
        assert sorted(positions) == expected
        assert shuffled or ids == positions


# --- no distributed sampler


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_sequential_loader_on_all_processes_is_shared_out(world_size):
    for length in SIZES:
        check_once([loader(length, None) for _ in range(world_size)], list(range(length)), ordered=True)
        single = [DataLoader(Positions(length), batch_size=1) for _ in range(world_size)]
        check_once(single, list(range(length)), ordered=True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_no_process_gets_more_than_its_share(world_size):
    shards = [shard_of(loader(12, None), rank, world_size) for rank in range(world_size)]
    shares = [sum(sample_id is not None for sample_id in shard.sample_ids(0, 12)) for shard in shards]
    assert shares == [12 // world_size] * world_size


class Forever(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Positions(8), batch_size=2, shuffle=True),
        lambda: DataLoader(Positions(8), batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8)),
        lambda: DataLoader(Forever(), batch_size=2),
        lambda: [torch.arange(2), torch.arange(2)],
    ],
    ids=["shuffled", "weighted", "iterable", "no-loader"],
)
def test_what_may_differ_between_processes_is_not_claimed(make):
    # one process counts each sample once, unless the sampler repeats some by design
    repeats = isinstance(getattr(make(), "sampler", None), WeightedRandomSampler)
    assert shard_of(make(), 0, 1) == Shard(exact=not repeats)
    shards = [shard_of(make(), rank, 2) for rank in range(2)]
    assert [shard.exact for shard in shards] == [False, False]
    # counted as if all were different, with an id of its own for every sample
    assert sorted(shards[0].sample_ids(0, 3) + shards[1].sample_ids(0, 3)) == [0, 1, 2, 3, 4, 5]


class Blocks(DistributedSampler):
    """Hands out contiguous blocks, as samplers for evaluation often do."""

    def __iter__(self):
        share = math.ceil(len(self.dataset) / self.num_replicas)
        positions = list(range(len(self.dataset)))[self.rank * share : (self.rank + 1) * share]
        return iter(positions + [len(self.dataset) - 1] * (share - len(positions)))


def test_a_distributed_sampler_of_other_origin_is_not_claimed():
    loaders = [loader(5, Blocks(Positions(5), 2, rank)) for rank in range(2)]
    assert [shard_of(each, rank, 2).exact for rank, each in enumerate(loaders)] == [False, False]


def test_a_subclass_that_keeps_the_order_is_still_exact():
    class Renamed(DistributedSampler):
        """Adds a name only."""

    loaders = [loader(5, Renamed(Positions(5), 2, rank, shuffle=False)) for rank in range(2)]
    check_once(loaders, list(range(5)), ordered=True)


class RankBatches(BatchSampler):
    """A batch sampler that shards by itself and keeps no sampler."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self.positions = list(range(rank, length, world_size))

    def __iter__(self):
        return iter([self.positions])

    def __len__(self) -> int:
        return 1


def test_a_batch_sampler_that_may_shard_by_itself_is_not_claimed():
    # such a loader has a sequential sampler too, which it does not use
    loaders = [DataLoader(Positions(6), batch_sampler=RankBatches(6, rank, 2)) for rank in range(2)]
    assert isinstance(loaders[0].sampler, SequentialSampler)
    ids, positions, exact = counted(loaders)
    assert not exact
    assert sorted(positions) == list(range(6)), "no sample may be lost"
    assert len(set(ids)) == 6


def test_a_batch_sampler_around_a_distributed_one_is_understood():
    loaders = []
    for rank in range(2):
        sampler = DistributedSampler(Positions(7), 2, rank, shuffle=False)
        batches = BatchSampler(sampler, batch_size=3, drop_last=False)
        loaders.append(DataLoader(Positions(7), batch_sampler=batches))
    check_once(loaders, list(range(7)), ordered=True)


def test_loaders_without_batching_are_understood():
    for rank, expected in enumerate(([0, 2, 4], [1, 3, None])):
        each = DataLoader(
            Positions(5), batch_size=None, sampler=DistributedSampler(Positions(5), 2, rank, shuffle=False)
        )
        assert shard_of(each, rank, 2).sample_ids(0, 3) == expected


def test_an_empty_share_of_an_empty_data_set_is_understood():
    # an empty sampler is falsy
    empty = DataLoader(Positions(0), batch_size=2, sampler=DistributedSampler(Positions(0), 2, 1, shuffle=False))
    assert shard_of(empty, 1, 2) == Shard(stride=2, offset=1, length=0)


def test_ids_do_not_depend_on_the_cut_into_batches():
    shard = Shard(stride=3, offset=1, length=20)
    whole = shard.sample_ids(0, 9)
    assert whole == [1, 4, 7, 10, 13, 16, 19, None, None]
    for cut in (1, 2, 4, 9):
        assert [i for start in range(0, 9, cut) for i in shard.sample_ids(start, min(cut, 9 - start))] == whole
    assert shard.sample_ids(5, 0) == []


# --- several loaders


def test_loaders_are_flattened_in_the_order_of_lightning():
    combined = importlib.import_module("lightning.pytorch.utilities.combined_loader").CombinedLoader
    a, b, c, d = (DataLoader(Positions(1), collate_fn=default_collate) for _ in range(4))
    for structure in (
        a,
        [a, b],
        (a, [b, c]),
        {"x": a, "y": [b, {"z": c}]},
        OrderedDict(second=b, first=a),
        [{"x": a}, (b, (c, d))],
    ):
        expected = combined(structure, "sequential").flattened
        found = flatten_loaders(structure)
        assert [id(each) for each in found] == [id(each) for each in expected]


def test_nothing_to_flatten():
    assert flatten_loaders([]) == []
    assert flatten_loaders({"a": [], "b": ()}) == []


def test_fingerprints_tell_data_sets_apart():
    x = torch.rand(6, 2)
    same = [DataLoader(torch.utils.data.TensorDataset(x.clone(), torch.arange(6))) for _ in range(2)]
    assert fingerprint(same[0]) == fingerprint(same[1]) != 0
    others = [(x[:5], torch.arange(5)), (x + 1e-6, torch.arange(6)), (x, torch.arange(6).flip(0))]
    for tensors in others:
        assert fingerprint(DataLoader(torch.utils.data.TensorDataset(*tensors))) != fingerprint(same[0])
    assert fingerprint(DataLoader(Forever(), batch_size=2)) == 0
    assert fingerprint([torch.arange(2)]) == 0


def test_fingerprints_draw_nothing_from_the_global_stream():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, place):
            return torch.rand(2)

    before = torch.get_rng_state()
    assert fingerprint(DataLoader(Noisy())) == fingerprint(DataLoader(Noisy()))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_the_users_own_making_are_not_claimed():
    loader = DataLoader(Positions(4), batch_sampler=[[0, 1, 2, 3], [0, 1, 2, 3]])
    assert not shard_of(loader, 0, 1).exact
