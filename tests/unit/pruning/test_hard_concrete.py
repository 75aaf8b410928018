"""Learned masks: golden values, the Lagrangian against plain arithmetic, exact shapes, resume, and a real training."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError
from robustdist.pruning.cost import CostModel
from robustdist.pruning.gates import Gates, fold
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.hard_concrete import LearnedMasks, gate_sample, keep_probability, lagrangian, soft_value
from robustdist.pruning.recipe import compile_recipe
from robustdist.pruning.selection import Target
from tests.unit.pruning.digits import digits, digits_groups, digits_net


def group(name: str, size: int, kind: str, locked: tuple[int, ...] = ()) -> UnitGroup:
    member = Member(f"{name}.weight", 0, torch.arange(size), "producer")
    return UnitGroup(name, kind, size, (member,), locked=frozenset(locked))


LAYERS = [group(f"{layer}.{kind}", size, kind) for layer in range(2) for kind, size in (("heads", 12), ("ffn", 40))]


def test_golden_values():
    a = torch.tensor([5.0, 2.0, 0.0, -2.0, -5.0]).double()
    probabilities = torch.tensor([0.998640, 0.973367, 0.831822, 0.400975, 0.032252]).double()
    torch.testing.assert_close(keep_probability(a), probabilities, rtol=0, atol=1e-6)
    values = torch.tensor([0.997527, 0.916827, 0.5, 0.083173, 0.002473]).double()
    torch.testing.assert_close(soft_value(a), values, rtol=0, atol=1e-6)
    drawn = gate_sample(torch.zeros(3).double(), torch.tensor([0.1, 0.5, 0.9]).double())
    torch.testing.assert_close(drawn, torch.tensor([0.0, 0.5, 1.0]).double(), rtol=0, atol=1e-6)
    assert keep_probability(torch.tensor([-99.0, 99.0])).tolist() == pytest.approx([1e-6, 1 - 1e-6], abs=1e-7)


def test_the_probability_is_the_share_of_samples_above_zero():
    a = torch.tensor([-3.0, -1.0, 1.0]).double()
    u = torch.rand(20000, 3, generator=torch.Generator().manual_seed(0)).double()
    share = (gate_sample(a, u) > 0).double().mean(0)
    torch.testing.assert_close(share, keep_probability(a), rtol=0, atol=0.015)


def test_the_lagrangian_of_a_shape_is_a_mean_over_layers_and_a_sum_over_kinds():
    masks = LearnedMasks(LAYERS, Target.parse({"heads": 6, "ffn": 10}), warmup_steps=10, start=0.1, init_std=1.0)
    with torch.no_grad():
        masks.multipliers.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))  # ffn, heads
    expected = 0.0
    for each in LAYERS:
        final, (first, second) = (0.5, (3.0, 4.0)) if each.kind == "heads" else (0.75, (1.0, 2.0))
        target = 0.1 + 0.4 * (final - 0.1)
        s = 1 - float(keep_probability(masks.log_alpha[each.name].detach()).mean())
        expected += (first * (s - target) + second * (s - target) ** 2) / 2
    assert masks.loss(4).item() == pytest.approx(expected, rel=1e-9)
    assert lagrangian(torch.tensor(0.5), 0.3, torch.tensor([2.0, 10.0])).item() == pytest.approx(0.8)


def test_one_step_is_adam_down_for_masks_and_up_for_multipliers():
    net = digits_net((4, 4, 4))
    groups = digits_groups(net)
    cost = CostModel(net, groups)
    masks = LearnedMasks(groups, Target("params", 0.5), cost=cost, init=1.0, lr=6.0, multiplier_lr=0.2, init_std=0.5)
    before = {name: values.detach().clone() for name, values in masks.log_alpha.items()}
    gradients = {name: torch.linspace(-1, 1, 4).double() + 0.1 for name in before}
    u = {
        each.name: torch.rand(4, generator=masks._generator("sample", each, 7), dtype=torch.float64) for each in groups
    }
    leaves = {name: values.clone().requires_grad_() for name, values in before.items()}
    sum((gate_sample(leaves[name], u[name]) * gradients[name]).sum() for name in leaves).backward()
    for each in groups:
        torch.testing.assert_close(masks.sample(7)[each.name], gate_sample(before[each.name], u[each.name]))
    masks.step(gradients, 7)
    # the first step of Adam is the sign of the gradient; the multipliers are 0, so only the loss moves the masks
    for name, values in masks.log_alpha.items():
        expected = (before[name] - 6.0 * leaves[name].grad.sign()).clamp(math.log(0.01), math.log(100))
        torch.testing.assert_close(values.detach(), expected, rtol=0, atol=1e-5)
    # too little is expected to go: lambda_1 falls, so that its term pays for sparsity
    assert masks.multipliers.tolist()[0] == pytest.approx([-0.2, 0.2], abs=1e-5)
    assert masks.progress(7) == 1.0


def test_both_learning_rates_fall_to_a_tenth_as_half_a_cosine():
    for step, factor in ((0, 1.0), (5, 0.55), (10, 0.1), (99, 0.1)):
        masks = LearnedMasks(LAYERS[:1], Target("width", 0.5), total_steps=10, init=0.0, lr=1.0, multiplier_lr=2.0)
        before = masks.scores()["0.heads"]
        masks.step({"0.heads": torch.ones(12)}, step)
        moved = (masks.scores()["0.heads"] - before).abs().max().item()
        assert moved == pytest.approx(factor, abs=1e-3)
        assert masks.multipliers.abs().max().item() == pytest.approx(2 * factor, abs=1e-3)


def test_of_the_whole_each_group_loses_as_many_as_are_expected_to_go():
    net = digits_net((16, 32, 4))
    groups = digits_groups(net)
    masks = LearnedMasks(groups, Target("params", 0.5), cost=CostModel(net, groups), init=0.0)
    with torch.no_grad():
        masks.log_alpha["0"][:3] = -4.0
        masks.log_alpha["6"][:] = torch.tensor([-4.5, -4.5, -4.4, -4.6])
    for each in groups:
        expected = float(keep_probability(masks.log_alpha[each.name].detach()).sum())
        kept = each.size - len(masks.removed().get(each.name, []))
        assert abs(kept - expected) <= 0.5 or (kept == 1 and expected < 0.5)
    # 0.83 * 13 + 0.08 * 3 and 0.83 * 32 are nearest to 11 and 27
    assert {name: len(units) for name, units in masks.removed().items()} == {"0": 5, "3": 5, "6": 3}
    assert masks.removed()["0"][:3] == [0, 1, 2]
    assert masks.removed()["6"] == [0, 1, 3]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [1, 5, 12])
def test_exact_shapes_whatever_the_masks_say(seed, heads):
    layers = [*LAYERS, group("locked", 12, "heads", locked=(3,))]
    masks = LearnedMasks(layers, Target.parse({"heads": heads, "ffn": 17}), init=0.0, init_std=3.0, seed=seed)
    removed = masks.removed()
    for each in layers:
        gone = removed.get(each.name, [])
        assert each.size - len(gone) == (heads if each.kind == "heads" else 17)
        values = masks.values()[each.name]
        assert values[gone].tolist() == [0.0] * len(gone)
        kept = sorted(set(range(each.size)) - set(gone) - each.locked)
        scores = masks.scores()[each.name]
        torch.testing.assert_close(values[kept], soft_value(scores[kept]))
        assert not gone or not kept or scores[kept].min() >= scores[gone].max()
    assert 3 not in removed.get("locked", [])
    assert masks.sample(0)["locked"][3] == masks.values()["locked"][3] == masks.probabilities()["locked"][3] == 1
    assert LearnedMasks(LAYERS, Target("width", 0.5)).widths == {each.name: each.size // 2 for each in LAYERS}
    assert set(LearnedMasks(LAYERS, Target.parse({"ffn": 8})).log_alpha) == {"0.ffn", "1.ffn"}


def test_start_and_samples_depend_on_seed_and_step_alone():
    state = torch.random.get_rng_state()
    first, twin, other = (
        LearnedMasks(LAYERS, Target("width", 0.5), seed=seed, init={"ffn": 0.0}) for seed in (1, 1, 2)
    )
    name = "0.ffn"
    assert torch.equal(first.sample(3)[name], twin.sample(3)[name])
    assert not torch.equal(first.sample(3)[name], first.sample(4)[name])
    assert not torch.equal(first.sample(3)[name], other.sample(3)[name])
    assert abs(first.scores()[name].mean()) < 0.01
    assert abs(first.scores()["0.heads"].mean() - math.log(100)) < 0.5
    assert torch.equal(state, torch.random.get_rng_state())


# --- training


def train(masks: LearnedMasks, net: nn.Module, groups: list[UnitGroup], steps: range, seed: int = 0) -> None:
    x, y = digits()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    with Gates(net, groups) as gates:
        for step in steps:
            rows = torch.randint(0, 1257, (64,), generator=torch.Generator().manual_seed(1000 * seed + step))
            gates.set(masks.sample(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            masks.step(gates.gradients(), step)
            optimizer.step()


def accuracy(net: nn.Module) -> float:
    x, y = digits()
    with torch.no_grad():
        return (net.eval()(x[1257:]).argmax(1) == y[1257:]).float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["params", "macs"])
def test_half_of_a_digits_net_is_reached_in_230_steps_and_removal_changes_nothing(name):
    net = digits_net()
    groups = digits_groups(net)
    x = digits()[0][1257:]
    cost = CostModel(net, groups, lambda: net(x[:1]))
    masks = LearnedMasks(groups, Target(name, 0.5), cost=cost, warmup_steps=46, total_steps=230)
    train(masks, net, groups, range(230))
    expected, final, _ = masks.sparsities()
    assert final.tolist() == [0.5]
    assert expected.item() == pytest.approx(0.5, abs=0.02)
    removed, values = masks.removed(), masks.values()
    # whole units: the middle layer's are 2.5 % each
    assert getattr(cost.of(removed), name) / getattr(cost.dense, name) == pytest.approx(0.5, abs=0.03)
    net.eval()
    with Gates(net, groups) as gates, torch.no_grad():
        gates.set(values)
        gated = net(x)
    fold(net, groups, values)
    compile_recipe(net, groups, removed).apply(net)
    with torch.no_grad():
        torch.testing.assert_close(net(x), gated, rtol=0, atol=1e-4)
    assert sum(parameter.numel() for parameter in net.parameters()) == cost.of(removed).params
    assert accuracy(net) > 0.94


@pytest.mark.slow
def test_an_exact_shape_is_also_what_is_expected_after_training():
    net = digits_net()
    groups = digits_groups(net)
    masks = LearnedMasks(groups, Target("width", 0.5), warmup_steps=46, total_steps=230)
    train(masks, net, groups, range(230))
    assert masks.sparsities()[0].tolist() == pytest.approx([0.5] * 3, abs=0.05)
    assert {name: len(units) for name, units in masks.removed().items()} == {"0": 8, "3": 16, "6": 16}


def test_resumed_masks_go_on_as_if_nothing_had_happened():
    def fresh() -> tuple[nn.Module, list[UnitGroup], LearnedMasks]:
        net = digits_net((4, 4, 4))
        groups = digits_groups(net)
        cost = CostModel(net, groups)
        return (
            net,
            groups,
            LearnedMasks(groups, Target("params", 0.5), cost=cost, warmup_steps=4, total_steps=8, seed=3),
        )

    net, groups, masks = fresh()
    train(masks, net, groups, range(3))
    file = io.BytesIO()
    torch.save(masks.state_dict(), file)
    file.seek(0)
    _, _, resumed = fresh()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    twin = copy.deepcopy(net)
    train(masks, net, groups, range(3, 6))
    train(resumed, twin, groups, range(3, 6))
    assert torch.equal(masks.multipliers, resumed.multipliers)
    assert all(torch.equal(values, resumed.log_alpha[name]) for name, values in masks.log_alpha.items())
    assert masks.multipliers.abs().min() > 0.5


def test_ranks_with_different_data_learn_the_same_masks():
    def learn(rank: int) -> list[list[float]]:
        net = digits_net((4, 4, 4))
        groups = digits_groups(net)
        masks = LearnedMasks(groups, Target("width", 0.5))
        x, y = digits()

        def mean(row: Tensor) -> Tensor:
            dist.all_reduce(row)
            return row / 2

        with Gates(net, groups) as gates:
            for step in range(3):
                gates.set(masks.sample(step))
                rows = slice(64 * rank, 64 * rank + 64)
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                masks.step(gates.gradients(mean), step)
        return [values.tolist() for values in masks.log_alpha.values()]

    first, second = run_ranks(learn)
    assert first == second


# --- wrong input


def test_wrong_input_is_named():
    with pytest.raises(UsageError, match="cannot aim at latency_ms"):
        LearnedMasks(LAYERS, Target("latency_ms", 3.0))
    with pytest.raises(UsageError, match="params needs cost="):
        LearnedMasks(LAYERS, Target("params", 0.5))
    net = digits_net((4, 4, 4))
    with pytest.raises(UsageError, match="CostModel that counts macs"):
        LearnedMasks(digits_groups(net), Target("macs", 0.5), cost=CostModel(net, digits_groups(net)))
    with pytest.raises(UsageError, match=r"shape of 13 does not fit group 0\.heads, which can have 1 to 12"):
        LearnedMasks(LAYERS, Target.parse({"heads": 13}))
    with pytest.raises(UsageError, match="shape of 0 does not fit"):
        LearnedMasks(LAYERS, Target.parse({"heads": 0}))
    with pytest.raises(UsageError, match="no such groups"):
        LearnedMasks(LAYERS, Target.parse({"channels": 3}))
    masks = LearnedMasks(LAYERS, Target("width", 0.5))
    with pytest.raises(UsageError, match="no masks of these groups"):
        masks.load_state_dict(LearnedMasks(LAYERS, Target.parse({"ffn": 8})).state_dict())
