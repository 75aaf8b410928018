"""Groups of layers against all ways to cut them."""

from __future__ import annotations

import itertools
import random

import pytest

from robustdist import UsageError
from robustdist.comm.grouping import Cost, Layer, Profile, expose, plan_groups


def partitions(count: int) -> itertools.chain[tuple[tuple[int, int], ...]]:
    """All ways to cut ``count`` layers into groups, as (first, stop)."""
    places = range(1, count)
    cuts = itertools.chain.from_iterable(itertools.combinations(places, k) for k in range(count))
    return (tuple(itertools.pairwise((0, *cut, count))) for cut in cuts)


def waited(profile: Profile, cost: Cost, groups: tuple[tuple[int, int], ...]) -> float:
    """Seconds between the end of the backward pass and that of the last message."""
    free = 0.0
    for first, stop in groups:
        ready = max(layer.ready for layer in profile.layers[first:stop])
        size = sum(layer.num_bytes for layer in profile.layers[first:stop])
        free = max(free, ready) + cost.latency + size * (cost.ratio / cost.bandwidth + cost.codec)
    return max(0.0, free - profile.end)


@pytest.mark.parametrize("seed", range(120))
def test_no_way_to_cut_is_better_and_none_as_good_has_fewer_groups(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 10) if seed % 4 else 8
    times = sorted(draw.choice([draw.random(), draw.randint(0, 3) / 3]) for _ in range(count))
    layers = tuple(Layer((f"{i}.w", f"{i}.b"), time, draw.choice([0, 1, 10, 100])) for i, time in enumerate(times))
    profile = Profile(layers, times[-1] + draw.choice([0.0, 0.3]))
    cost = Cost(draw.choice([0.0, 0.01, 0.2]), draw.choice([100.0, 1000.0]), draw.choice([0.0, 0.002]), 0.5)
    found = plan_groups(profile, cost)
    results = [(waited(profile, cost, groups), len(groups)) for groups in partitions(count)]
    best = min(seconds for seconds, _ in results)
    assert sum(group.exposed for group in found) == pytest.approx(best, abs=1e-9)
    assert len(found) == min(groups for seconds, groups in results if seconds <= best + 1e-9)
    assert [name for group in found for name in group.names] == [name for layer in layers for name in layer.names]
    assert all(name.endswith(".b") for name in (group.names[-1] for group in found)), "no layer is cut"
    assert [group.exposed for group in found] == expose([group.end for group in found], profile.end)


def test_a_slow_start_makes_one_message_and_a_slow_link_hides_what_it_can():
    profile = Profile(tuple(Layer((str(i),), float(i), 10) for i in range(1, 6)), 5.0)
    assert len(plan_groups(profile, Cost(latency=100.0, bandwidth=10.0))) == 1
    assert len(plan_groups(profile, Cost(latency=0.0, bandwidth=10.0))) == 5
    fast = plan_groups(profile, Cost(latency=0.0, bandwidth=40.0))
    assert [group.names for group in fast] == [("1", "2", "3", "4"), ("5",)], "what is hidden may go together"
    assert [group.exposed for group in fast] == [0.0, 0.25]
    both = plan_groups(profile, lambda num_bytes: 2.0 + num_bytes / 10)
    assert (len(both), sum(group.exposed for group in both)) == (2, 6.0)


def test_parameters_of_a_module_are_one_layer_and_ready_with_the_last_of_them():
    ready = {"top": 0.5, "net.0.weight": 3.0, "net.0.bias": 1.0, "net.1.weight": 2.0, "net.1.bias": 0.1}
    profile = Profile.of_parameters(ready, dict.fromkeys(ready, 4))
    assert [layer.names for layer in profile.layers] == [
        ("top",), ("net.1.bias", "net.1.weight"), ("net.0.bias", "net.0.weight"),
    ]  # fmt: skip
    assert [layer.ready for layer in profile.layers] == [0.5, 2.0, 3.0]
    assert profile.end == 3.0
    assert plan_groups(Profile.of_parameters({}, {}), Cost(1.0, 1.0)) == []


@pytest.mark.parametrize(
    ("ready", "num_bytes", "message"),
    [
        ({"a": 1.0}, {"b": 1}, "differ in"),
        ({"a": float("nan")}, {"a": 1}, "of 'a' must be finite"),
        ({"a": -1.0}, {"a": 1}, "of 'a' must be finite"),
        ({"a": 1.0}, {"a": -1}, "of 'a' must be finite"),
    ],
)
def test_wrong_profiles_are_refused(ready, num_bytes, message):
    with pytest.raises(UsageError, match=message):
        Profile.of_parameters(ready, num_bytes)
