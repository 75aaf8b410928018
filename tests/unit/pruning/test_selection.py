"""Targets are met, exactly where they are exact; what is removed grows with the target; wrong input is named."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning.cost import CostModel
from robustdist.pruning.groups import Kind, Member, UnitGroup
from robustdist.pruning.importance import Random
from robustdist.pruning.selection import Target, select
from tests.unit.pruning.written_groups import conv_groups, conv_net


def group(name: str, size: int, kind: Kind = "channels", locked: tuple[int, ...] = ()) -> UnitGroup:
    member = Member(f"{name}.weight", 0, torch.arange(size), "producer")
    return UnitGroup(name, kind, size, (member,), locked=frozenset(locked))


def random_scores(groups: list[UnitGroup], seed: int = 0) -> dict[str, Tensor]:
    return {each.name: Random(seed=seed).score(each, {}) for each in groups}


def widths(groups: list[UnitGroup], removed: dict[str, list[int]]) -> dict[str, int]:
    return {each.name: each.size - len(removed.get(each.name, ())) for each in groups}


def linear_cost(groups: list[UnitGroup]) -> CostModel:
    layers = {each.name: torch.nn.Linear(1, each.size, bias=False) for each in groups}
    return CostModel(torch.nn.ModuleDict(layers), groups)


SIZES = [group("a", 64), group("b", 40), group("c", 12), group("h", 12, "heads"), group("f", 6, "ffn")]


# --- one group after the other


def test_width_keeps_the_share_with_the_highest_scores_in_multiples():
    scores = random_scores(SIZES)
    removed = select(SIZES, scores, target=Target("width", 0.5))
    # 20 of 40 is as near to 16 as to 24, and 6 of 12 is nearest to 8; heads and the group of 6 are not rounded
    assert widths(SIZES, removed) == {"a": 32, "b": 24, "c": 8, "h": 6, "f": 3}
    for each in SIZES:
        kept = set(range(each.size)) - set(removed[each.name])
        assert min(scores[each.name][list(kept)]) > max(scores[each.name][removed[each.name]])
        assert removed[each.name] == sorted(removed[each.name])
    exact = select(SIZES, scores, target=Target("width", 0.5), round_to=1)
    assert widths(SIZES, exact) == {"a": 32, "b": 20, "c": 6, "h": 6, "f": 3}


def test_ties_go_by_position():
    flat = {"a": torch.zeros(4), "b": torch.zeros(4)}
    groups = [group("a", 4), group("b", 4)]
    assert select(groups, flat, target=Target("width", 0.5)) == {"a": [0, 1], "b": [0, 1]}
    assert select(groups, flat, target=Target("params", 0.5), cost=linear_cost(groups)) == {"a": [0, 1, 2], "b": [0]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("heads", [1, 7, 12])
def test_an_exact_shape_is_exact(heads, seed):
    groups = [group(f"{layer}.h", 12, "heads") for layer in range(3)]
    groups += [group(f"{layer}.f", 100, "ffn") for layer in range(3)]
    target = Target.parse({"heads": heads, "ffn": 37})
    previous: dict[str, list[int]] = {}
    for progress in (0.0, 0.3, 0.7, 1.0):
        removed = select(groups, random_scores(groups, seed), target=target, progress=progress, removed=previous)
        assert all(set(units) <= set(removed[name]) for name, units in previous.items())
        previous = removed
    assert set(widths(groups[:3], removed).values()) == {heads}
    assert set(widths(groups[3:], removed).values()) == {37}
    assert widths(groups, select(groups, random_scores(groups), target=target, progress=0.5))["1.f"] == 100 - 32


# --- amounts of the whole


@pytest.fixture(scope="module")
def model():
    net, groups = conv_net(), conv_groups()
    return CostModel(net, groups, lambda: net(torch.zeros(1, 2, 4, 4))), groups


@pytest.mark.filterwarnings("ignore:target .* the next size below")
@pytest.mark.parametrize(("name", "uniform"), list(itertools.product(["params", "macs"], [True, False])))
def test_the_target_is_met_by_the_least_removal_and_grows_with_it(model, name, uniform):
    cost, groups = model
    scores, before = random_scores(groups), None
    for wanted in (0.95, 0.8, 0.6, 0.5, 0.4):
        removed = select(groups, scores, target=Target(name, wanted), cost=cost, uniform=uniform, round_to=1)
        assert getattr(cost.of(removed), name) <= wanted * getattr(cost.dense, name)
        if uniform:
            shares = [left / each.size for each, left in zip(groups, widths(groups, removed).values(), strict=True)]
            assert max(shares) - min(shares) <= 0.5 / 3 + 0.5 / 4
        else:
            # putting back the unit with the highest score of those that go misses the target
            last = max(((scores[key][unit], key, unit) for key, units in removed.items() for unit in units))
            less = {key: [u for u in units if (key, u) != last[1:]] for key, units in removed.items()}
            assert getattr(cost.of(less), name) > wanted * getattr(cost.dense, name)
        if before is not None:
            assert all(set(units) <= set(removed[key]) for key, units in before.items())
        before = removed


def test_a_global_threshold_takes_units_where_scores_are_low(model):
    cost, groups = model
    scores = {each.name: torch.full((each.size,), place + 1.0) for place, each in enumerate(groups)}
    removed = select(groups, scores, target=Target("macs", 0.6), cost=cost)
    assert set(removed) == {"conv1"}


def test_a_result_far_below_the_target_is_told():
    groups = [group("a", 16), group("b", 16)]
    with pytest.warns(RobustDistWarning, match=r"params=0.95: the next size below it is 0.5; a smaller round_to"):
        select(groups, random_scores(groups), target=Target("params", 0.95), cost=linear_cost(groups), uniform=True)


def test_progress_goes_from_nothing_to_the_target(model):
    cost, groups = model
    scores = random_scores(groups)
    half = select(groups, scores, target=Target("params", 0.8), cost=cost, progress=0.5)
    assert cost.of(half).params <= 0.9 * cost.dense.params
    assert half == select(groups, scores, target=Target("params", 0.9), cost=cost)
    assert select(groups, scores, target=Target("params", 0.5), cost=cost, progress=0.0) == {}


def test_latency_is_measured_a_few_times():
    groups = [group("a", 64), group("b", 512)]
    seen = []

    def latency(removed: dict[str, list[int]]) -> float:
        seen.append(removed)
        return 1 + sum(widths(groups, removed).values()) / 100

    removed = select(groups, random_scores(groups), target=Target("latency_ms", 4), latency=latency, uniform=True)
    assert 3.7 <= latency(removed) <= 4
    assert len(seen) <= 10
    with pytest.raises(UsageError, match=r"latency_ms=1.05 cannot be reached.* 1.16 is left"):
        select(groups, random_scores(groups), target=Target("latency_ms", 1.05), latency=latency)


# --- units that are out of reach


def test_ignored_locked_and_removed_units_and_least_widths():
    groups = [group("layer1.a", 8, locked=(0, 1)), group("layer1.b", 8), group("head", 8)]
    scores = {each.name: torch.arange(8.0) - 9 for each in groups}
    gone = {"layer1.b": [7]}
    removed = select(groups, scores, target=Target("width", 0.25), ignore=["head", "x*"], removed=gone)
    assert removed == {"layer1.a": [2, 3, 4, 5, 6, 7], "layer1.b": [0, 1, 2, 3, 4, 7]}
    removed = select(groups, scores, target=Target("width", 0.25), min_units=3, ignore=["layer1.*"], removed=gone)
    assert removed == {"layer1.b": [7], "head": [0, 1, 2, 3, 4]}
    more = {"head": [1, 5, 6]}
    assert select(groups[2:], scores, target=Target("width", 0.75), removed=more) == more
    assert select(groups[2:], scores, target=Target("width", 0.01), min_units=0, drop_layers=True) == {
        "head": list(range(8))
    }


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"macs": 0}, r"macs=0 is out of range.*\(0, 1\]"),
        ({"width": 1.2}, "width=1.2 is out of range"),
        ({"latency_ms": -1}, "milliseconds above 0"),
        ({"macs": 0.5, "params": 0.5}, "give one of params, macs"),
        ({"macs": 0.5, "heads": 6}, "give one of params, macs"),
        ({"flops": 0.5}, "flops"),
        ({}, "give one of"),
        ({"heads": 0.5}, r"heads=0.5 must be a whole number"),
        ({"macs": "half"}, "macs='half' is not a number"),
    ],
)
def test_targets_are_checked(target, message):
    with pytest.raises(UsageError, match=message):
        Target.parse(target)


def test_targets_are_read():
    assert Target.parse({"macs": "1/2"}) == Target("macs", 0.5)
    assert Target.parse({"ffn": 768, "heads": 6}).shape == {"heads": 6, "ffn": 768}
    from_a_file = Target.parse({"heads": 6.0, "layers": 4.0}).shape
    assert repr(from_a_file) == "{'heads': 6, 'layers': 4}"


def test_wrong_input_is_named(model):
    cost, groups = model
    scores = random_scores(groups)
    with pytest.raises(UsageError, match=r"params=0.05 cannot be reached.* 0\.0997 is left"):
        select(groups, scores, target=Target("params", 0.05), cost=cost)
    with pytest.raises(UsageError, match=r"group conv1: all 3 channels would go; raise the target .*ignore"):
        select(groups, scores, target=Target.parse({"channels": 0}))
    with pytest.raises(UsageError, match="ffn=9 does not fit group hidden, which can have 0 to 5"):
        select(groups, scores, target=Target.parse({"ffn": 9}))
    with pytest.raises(UsageError, match="ffn=4 does not fit group hidden, which can have 0 to 3"):
        select(groups, scores, target=Target.parse({"ffn": 4}), removed={"hidden": [0, 1]})
    with pytest.raises(UsageError, match="heads=4: the model has no group of heads"):
        select(groups, scores, target=Target.parse({"heads": 4}))
    with pytest.raises(UsageError, match="macs needs cost="):
        select(groups, scores, target=Target("macs", 0.5))
    with pytest.raises(UsageError, match="latency_ms needs latency="):
        select(groups, scores, target=Target("latency_ms", 5))
    with pytest.raises(UsageError, match=r"progress=1\.5"):
        select(groups, scores, target=Target("width", 0.5), progress=1.5)
    with pytest.raises(UsageError, match="round_to=0"):
        select(groups, scores, target=Target("width", 0.5), round_to=0)
    with pytest.raises(UsageError, match="no macs that were counted"):
        select(groups, scores, target=Target("macs", 0.5), cost=CostModel(conv_net(), groups))
    scores["conv2"][1] = float("nan")
    with pytest.raises(UsageError, match=r"group conv2 must be 4 finite numbers, not \(4,\) with 1 that are none"):
        select(groups, scores, target=Target("width", 0.5))
