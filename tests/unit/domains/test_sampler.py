"""The stream of draws: one for all processes, no sample twice before its domain is through, resumed to the draw."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from robustdist.domains import DomainSampler, find_domain_ids, with_sampler
from robustdist.errors import UsageError

SIZES = (1000, 50, 3)
IDS = [domain for domain, size in enumerate(SIZES) for _ in range(size)]


def epochs(sampler: DomainSampler, count: int) -> list[int]:
    drawn = []
    for _ in range(count):
        drawn += list(sampler)
        sampler.consume(len(sampler))
        sampler.end_epoch()
    return drawn


def test_domains_are_drawn_by_their_ratios_and_small_ones_wrap():
    sampler = DomainSampler(IDS, [0.2, 0.3, 0.5])
    drawn = epochs(sampler, 3)
    assert len(drawn) == 3 * len(IDS) == sum(sampler.counts)
    shares = [count / len(drawn) for count in sampler.counts]
    assert shares == pytest.approx([0.2, 0.3, 0.5], abs=0.03)
    assert sampler.epochs == [count / size for count, size in zip(sampler.counts, SIZES, strict=True)]
    start = 0
    for domain, size in enumerate(SIZES):
        of_one = [place for place in drawn if IDS[place] == domain]
        for first in range(0, len(of_one) - size + 1, size):
            assert set(of_one[first : first + size]) == set(range(start, start + size)), (
                "repeated before it was through"
            )
        start += size
    small = [place for place in drawn if IDS[place] == 2]
    assert len({tuple(small[first : first + 3]) for first in range(0, 300, 3)}) == 6, "every pass has its own order"


def test_without_ratios_the_mix_is_that_of_the_data():
    sampler = DomainSampler(torch.tensor([0, 0, 0, 1]))
    assert sampler.ratios == [0.75, 0.25]
    assert sampler.sizes == [3, 1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_one_stream(world_size):
    alone = DomainSampler(IDS, [0.2, 0.3, 0.5], seed=4)
    ranks = [DomainSampler(IDS, [0.2, 0.3, 0.5], seed=4, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(2):
        parts = [list(sampler) for sampler in ranks]
        together = [place for row in zip(*parts, strict=True) for place in row]
        assert {len(part) for part in parts} == {len(ranks[0])} == {-(-len(IDS) // world_size)}
        whole = list(alone)
        assert together[: len(whole)] == whole
        for sampler in [*ranks, alone]:
            sampler.consume(len(sampler))
            sampler.end_epoch()
        if len(together) > len(whole):  # an epoch of several processes is rounded up
            break


def test_seeds_differ_and_the_global_state_is_left_alone():
    state = torch.get_rng_state()
    streams = {tuple(DomainSampler(IDS, seed=seed)) for seed in range(3)}
    assert len(streams) == 3
    assert tuple(DomainSampler(IDS, seed=1)) in streams
    assert torch.equal(state, torch.get_rng_state())


def test_other_ratios_hold_from_the_next_draw_and_what_waits_stays():
    sampler = DomainSampler(IDS, [0.98, 0.01, 0.01])
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(100)]
    sampler.set_ratios([0.01, 0.01, 0.98])
    rest = list(iterator)
    assert sum(IDS[place] == 0 for place in first) > 90
    assert sum(IDS[place] == 2 for place in rest) > 900
    assert list(sampler) == first + rest, "nothing was consumed: an iterator begins at the same draw"


def test_processes_that_drew_different_numbers_ahead_keep_to_one_stream():
    ranks = [DomainSampler(IDS, seed=2, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(sampler) for sampler in ranks]
    parts = [[next(iterator) for _ in range(ahead)] for iterator, ahead in zip(iterators, (40, 8), strict=True)]
    start = max(sampler.num_drawn for sampler in ranks)
    for sampler in ranks:
        sampler.set_ratios([0.1, 0.1, 0.8], start=start)
    parts = [part + list(iterator) for part, iterator in zip(parts, iterators, strict=True)]
    alone = DomainSampler(IDS, seed=2)
    iterator = iter(alone)
    whole = [next(iterator) for _ in range(start)]
    alone.set_ratios([0.1, 0.1, 0.8])
    whole += list(iterator)
    assert [place for row in zip(*parts, strict=True) for place in row][: len(whole)] == whole


def test_other_ratios_begin_on_all_processes_with_the_same_draw():
    ranks = [DomainSampler(IDS, seed=2, rank=rank, world_size=3) for rank in range(3)]
    iterators = [iter(sampler) for sampler in ranks]
    for iterator in iterators:
        _ = [next(iterator) for _ in range(10)]
    for sampler in ranks:
        sampler.set_ratios([0.1, 0.1, 0.8])
    assert len({tuple(sampler.state_dict()["waiting"]) for sampler in ranks}) == 1
    _ = [next(iterator) for iterator in iterators]
    assert len({tuple(sampler.state_dict()["waiting"]) for sampler in ranks}) == 1


def test_an_iterator_from_before_a_resume_says_so():
    sampler, later = DomainSampler(IDS), DomainSampler(IDS)
    iterator = iter(sampler)
    next(iterator)
    later.consume(10)
    sampler.load_state_dict(later.state_dict())
    with pytest.raises(RuntimeError, match="moved on"):
        next(iterator)


@pytest.mark.parametrize("ahead", [0, 7])
def test_a_resumed_stream_goes_on_behind_what_was_consumed(ahead):
    whole, half = (DomainSampler(IDS, [0.2, 0.3, 0.5], seed=5) for _ in range(2))
    expected = []
    iterator = iter(whole)
    for step in range(130):
        if step == 60:
            # seven draws of the old ratios are in worker processes
            ahead_ = iter(whole)
            _ = [next(ahead_) for _ in range(ahead)]
            whole.set_ratios([0.6, 0.3, 0.1])
        expected.append(next(iterator))
        whole.consume(1)
    iterator = iter(half)
    found = []
    for _ in range(60):
        found.append(next(iterator))
        half.consume(1)
    ahead_ = iter(half)
    _ = [next(ahead_) for _ in range(ahead)]
    half.set_ratios([0.6, 0.3, 0.1])
    resumed = DomainSampler(IDS, seed=5)
    resumed.load_state_dict(half.state_dict())
    rest = list(resumed)
    assert len(rest) == len(IDS) - 60
    assert found + rest[:70] == expected
    assert resumed.counts == half.counts
    resumed.consume(len(IDS))
    assert len(list(resumed)) == 0
    resumed.end_epoch()
    assert len(list(resumed)) == len(IDS)


def test_a_stream_is_resumed_with_another_number_of_processes():
    one = DomainSampler(IDS, seed=6)
    stream = list(one)
    one.consume(500)
    ranks = [DomainSampler(IDS, seed=6, rank=rank, world_size=2) for rank in range(2)]
    for sampler in ranks:
        sampler.load_state_dict(one.state_dict())
    together = [place for row in zip(*map(list, ranks), strict=True) for place in row]
    assert together[: len(stream) - 500] == stream[500:]


@pytest.mark.parametrize(
    ("ids", "ratios", "message"),
    [
        ([0, 0, 2], None, "no sample of domain 1 "),
        ([0, 1], [0.5, 0.3, 0.2], "no sample of domain 2"),
        ([0, 1, 2], [0.5, 0.5], "domain 2, but there are only 2, .*an entry for every domain"),
        ([], None, "whole numbers"),
        ([0, -1], None, "whole numbers"),
        ([0.5, 1], None, "whole numbers"),
        ([0, 1], [1.0, 0.0], "positive"),
        ([0, 1], [1.0, float("nan")], "positive"),
    ],
)
def test_wrong_domains_are_refused(ids, ratios, message):
    with pytest.raises(UsageError, match=message):
        DomainSampler(ids, ratios)


def test_wrong_numbers_of_ratios_are_refused():
    sampler = DomainSampler([0, 1])
    with pytest.raises(UsageError, match="3 numbers for 2 domains"):
        sampler.set_ratios([1, 1, 1])
    with pytest.raises(UsageError, match="samples of 3 domains, the data 2"):
        sampler.load_state_dict(DomainSampler([0, 1, 2]).state_dict())


# --- data sets and loaders


class WithTargets(TensorDataset):
    targets = (1, 0, 1, 1)


class Records(list):
    """Samples as dictionaries."""


TENSORS = WithTargets(torch.arange(4), torch.tensor([0, 1, 2, 0]))
RECORDS = Records([{"x": 1.0, "domain": 1}, {"x": 2.0, "domain": 0}])


@pytest.mark.parametrize(
    ("dataset", "option", "expected"),
    [
        (TENSORS, "targets", [1, 0, 1, 1]),
        (TENSORS, 1, [0, 1, 2, 0]),
        (TENSORS, [3, 3, 0, 1], [3, 3, 0, 1]),
        (TENSORS, torch.tensor([0, 0, 0, 1]), [0, 0, 0, 1]),
        (TENSORS, lambda dataset: dataset.tensors[0] % 2, [0, 1, 0, 1]),
        (Subset(TENSORS, [3, 1]), "targets", [1, 0]),
        (Subset(TENSORS, [2, 1]), 1, [2, 1]),
        (ConcatDataset([TENSORS, RECORDS]), None, [0, 0, 0, 0, 1, 1]),
        (Subset(ConcatDataset([TENSORS, RECORDS]), [5, 0]), None, [1, 0]),
        (RECORDS, "domain", [1, 0]),
    ],
)
def test_domains_are_found(dataset, option, expected):
    assert find_domain_ids(dataset, option) == expected


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "option", "message"),
    [
        (TENSORS, None, "domain_ids is not set and WithTargets does not tell"),
        (
            TENSORS,
            "label",
            "'label' is neither an attribute of WithTargets nor a key of its samples .*a function",
        ),
        (TENSORS, 2, "2 is neither"),
        (RECORDS, "class", r"keys x, domain"),
        (RECORDS, "x", "whole numbers"),
        (TENSORS, [0, 1], "2 domains for 4 training samples"),
        (TENSORS, [0, 1, 0.5, 1], "whole numbers"),
        (TENSORS, ["a", "b", "a", "b"], "whole numbers"),
        (Stream(), None, "iterable"),
    ],
)
def test_domains_that_are_not_there_are_refused(dataset, option, message):
    if option == "x":
        dataset = Records([{"x": 0.5}, {"x": 1.5}])
    with pytest.raises(UsageError, match=message):
        find_domain_ids(dataset, option)


def test_a_loader_keeps_its_settings():
    def collate(batch):
        return len(batch)

    loader = DataLoader(TENSORS, batch_size=3, shuffle=True, collate_fn=collate, drop_last=True, timeout=0)
    swapped = with_sampler(loader, DomainSampler([0, 1, 0, 1]))
    assert list(swapped) == [3]
    assert (swapped.batch_size, swapped.drop_last, swapped.dataset) == (3, True, TENSORS)


def test_a_loader_with_batches_of_its_own_is_refused():
    loader = DataLoader(TENSORS, batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(UsageError, match="batch_sampler"):
        with_sampler(loader, DomainSampler([0, 1, 0, 1]))


def test_worker_processes_read_ahead_and_nothing_is_lost():
    data = TensorDataset(torch.arange(len(IDS)))
    sampler = DomainSampler(IDS, [0.2, 0.3, 0.5])
    loader = with_sampler(DataLoader(data, batch_size=8, num_workers=1, prefetch_factor=3), sampler)
    iterator = iter(loader)
    seen = []
    for _ in range(5):
        seen += next(iterator)[0].tolist()
        sampler.consume(8)
    assert sampler.num_drawn == 8 * (5 + 3)
    resumed = DomainSampler(IDS, [0.2, 0.3, 0.5])
    resumed.load_state_dict(loader.state_dict())
    assert seen + list(resumed) == list(DomainSampler(IDS, [0.2, 0.3, 0.5]))
    assert Counter(IDS[place] for place in seen) == Counter(dict(enumerate(sampler.counts)))
