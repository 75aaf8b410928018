"""The mix of labelled and unlabelled samples: shares, lengths, samplers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from robustdist.core.testing import run_ranks
from robustdist.data import UnlabeledMix
from robustdist.errors import UsageError


def parts(num_labeled: int, num_unlabeled: int, integers: bool = False):
    x = torch.arange(num_labeled + num_unlabeled).view(-1, 1).float()
    y = torch.arange(num_labeled) % 3
    labeled = (
        [(row, int(label)) for row, label in zip(x, y, strict=False)] if integers else TensorDataset(x[:num_labeled], y)
    )
    return labeled, TensorDataset(x[num_labeled:])


@pytest.mark.parametrize(("num_labeled", "num_unlabeled"), [(4, 4), (3, 20), (20, 3), (1, 1), (7, 13), (100, 1)])
@pytest.mark.parametrize("share", [0.5, 0.25, 0.9, 1 / 3])
def test_all_samples_of_both_are_there_in_their_shares(num_labeled, num_unlabeled, share):
    mix = UnlabeledMix(*parts(num_labeled, num_unlabeled), share=share)
    counts = Counter((int(x), int(y) >= 0) for x, y in mix)
    labeled = {x: count for (x, known), count in counts.items() if known}
    unlabeled = {x: count for (x, known), count in counts.items() if not known}
    assert labeled.keys() == set(range(num_labeled))
    assert unlabeled.keys() == set(range(num_labeled, num_labeled + num_unlabeled))
    # repeated as evenly as can be, and one of the two not at all
    for times in (labeled, unlabeled):
        assert max(times.values()) - min(times.values()) <= 1
    assert 1 in (max(labeled.values()), max(unlabeled.values()))
    assert sum(unlabeled.values()) == pytest.approx(share * len(mix), abs=1)
    assert len(mix) == sum(counts.values())


def test_labels_stay_with_their_samples():
    labeled, unlabeled = parts(5, 2)
    for x, y in UnlabeledMix(labeled, unlabeled, 0.4):
        assert int(y) == (int(x) % 3 if x < 5 else -1)


@pytest.mark.parametrize("integers", [True, False])
def test_loaders_stack_both_kinds(integers):
    mix = UnlabeledMix(*parts(10, 10, integers))
    torch.manual_seed(0)
    batches = list(DataLoader(mix, batch_size=5, shuffle=True))
    assert len(batches) == 4
    y = torch.cat([y for _, y in batches])
    assert y.dtype == torch.int64
    assert int((y == -1).sum()) == 10
    assert any(0 < int((y == -1).sum()) < 5 for _, y in batches)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x, 7], lambda x: (x, torch.tensor(9))])
def test_whatever_target_an_unlabelled_sample_has_is_dropped(wrap):
    mix = UnlabeledMix(parts(2, 0)[0], [wrap(torch.tensor([5.0]))])
    x, y = mix[2]
    assert torch.equal(x, torch.tensor([5.0]))
    assert torch.equal(y, torch.tensor(-1))


def test_a_place_means_the_same_sample_whenever_it_is_asked():
    mix = UnlabeledMix(*parts(3, 8))
    first = [(float(x), int(y)) for x, y in mix]
    assert [(float(mix[place][0]), int(mix[place][1])) for place in reversed(range(len(mix)))] == first[::-1]
    for place in (-1, len(mix)):
        with pytest.raises(IndexError):
            mix[place]


def test_processes_share_it_without_overlap():
    def walk(rank: int):
        mix = UnlabeledMix(*parts(8, 8))
        sampler = DistributedSampler(mix, seed=3)
        sampler.set_epoch(1)
        return [(int(x), int(y)) for x, y in (mix[place] for place in sampler)]

    first, second = run_ranks(walk)
    assert len(first) == len(second) == 8
    assert sorted(first + second) == sorted((x, x % 3 if x < 8 else -1) for x in range(16))


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a, b: UnlabeledMix(a, b, share=0.0), "share=0.0 must be between 0 and 1"),
        (lambda a, b: UnlabeledMix(a, b, share=1.0), "share=1.0 must be between 0 and 1"),
        (lambda a, b: UnlabeledMix(TensorDataset(torch.zeros(0, 1), torch.zeros(0)), b), "labeled must be a data set"),
        (lambda a, b: UnlabeledMix(a, TensorDataset(torch.zeros(0, 1))), "unlabeled must be a data set"),
        (lambda a, b: UnlabeledMix(a, Endless()), "unlabeled must be a data set"),
    ],
)
def test_wrong_arguments_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make(*parts(2, 2))
