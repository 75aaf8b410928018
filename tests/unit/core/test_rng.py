"""Randomness that depends on its key and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from robustdist.core.rng import Noise, derive_seed


def test_seeds_differ_for_all_small_keys_and_stay_the_same_over_versions():
    keys = [(), *itertools.product(range(-2, 12), repeat=2), *itertools.product(range(6), repeat=3)]
    keys += [("a",), ("b",), ("a", "b"), ("ab",), ("a", 1), (1, "a"), ("1",), (1,)]
    # the eight bytes of an integer are not that integer
    keys += [("\x01" + "\x00" * 7,)]
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(set(keys))
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "step", 1, 2) == derive_seed(0, "step", 1, 2)


def test_seeds_are_not_those_of_this_process():
    """Hashes of strings differ between processes; these numbers may not."""
    assert [derive_seed(0), derive_seed("start", 1, 2)] == [8657178320881676842, 3867879853052701455]


def test_bits_of_seeds_are_balanced():
    seeds = [derive_seed(0, rank, step) for rank in range(8) for step in range(250)]
    for bit in range(63):
        assert 0.4 < sum(seed >> bit & 1 for seed in seeds) / len(seeds) < 0.6


def draws(noise: Noise, like: torch.Tensor | None = None) -> list[torch.Tensor]:
    like = torch.empty(4, 3, 2) if like is None else like
    return [noise.uniform(like, "start"), noise.normal(like, "start"), noise.integers(like.long(), 10, "start")]


@pytest.mark.parametrize("sample_ids", [None, [5, 1, 2, 3]], ids=["step", "samples"])
def test_draws_have_the_distribution_and_form_asked_for(sample_ids):
    for dtype in (torch.float32, torch.float64):
        like = torch.empty(4, 3000, dtype=dtype)
        uniform, normal, integers = draws(Noise(0, sample_ids=sample_ids), like)
        assert uniform.dtype == normal.dtype == dtype
        assert uniform.shape == normal.shape == integers.shape == like.shape
        assert 0.0 <= float(uniform.min()) <= float(uniform.max()) < 1.0
        torch.testing.assert_close(uniform.mean(1), torch.full((4,), 0.5, dtype=dtype), rtol=0, atol=0.03)
        torch.testing.assert_close(normal.mean(1), torch.zeros(4, dtype=dtype), rtol=0, atol=0.1)
        torch.testing.assert_close(normal.std(1), torch.ones(4, dtype=dtype), rtol=0, atol=0.1)
        assert integers.dtype == torch.int64
        assert set(integers.flatten().tolist()) == set(range(10))


@pytest.mark.parametrize("sample_ids", [None, [5, 1, 2, 3]], ids=["step", "samples"])
def test_draws_leave_the_global_generators_alone_and_do_not_follow_them(sample_ids):
    first = draws(Noise(0, sample_ids=sample_ids))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = draws(Noise(0, sample_ids=sample_ids))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_sample_ids_every_part_of_the_key_counts():
    base = draws(Noise(0, 1, 2))
    for other in (Noise(1, 1, 2), Noise(0, 2, 2), Noise(0, 1, 3), Noise(0, 2, 1)):
        assert not any(torch.equal(a, b) for a, b in zip(base, draws(other), strict=True))
    like = torch.empty(4, 3)
    noise = Noise(0)
    tagged = [noise.uniform(like, *tag) for tag in (("start",), ("radius",), ("start", 0), ("start", 1), ())]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(tagged, 2))


def test_rows_follow_their_sample_alone():
    like = torch.empty(4, 3, 2)
    base = draws(Noise(0, sample_ids=[5, 1, 2, 3]))
    for moved in (Noise(0, 7, 9, sample_ids=[5, 1, 2, 3]), Noise(0, sample_ids=torch.tensor([5, 1, 2, 3]))):
        assert all(torch.equal(a, b) for a, b in zip(base, draws(moved), strict=True))
    shuffled = draws(Noise(0, sample_ids=[3, 5, 9]), like[:3])
    for full, part in zip(base, shuffled, strict=True):
        assert torch.equal(part[:2], full[[3, 0]])
        assert not any(torch.equal(part[2], row) for row in full)
    assert not any(torch.equal(a, b) for a, b in zip(base, draws(Noise(1, sample_ids=[5, 1, 2, 3])), strict=True))
    tagged = [Noise(0, sample_ids=[5, 1, 2, 3]).uniform(like, *tag) for tag in (("start",), ("start", 1))]
    assert not torch.equal(*tagged)


def test_one_value_per_sample():
    values = Noise(0, sample_ids=[8, 8, 9]).uniform(torch.empty(3))
    assert values[0] == values[1] != values[2]
