"""Multipliers in front of the readers of units: their gradient, what they leave alone, and scores learned with them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError
from robustdist.pruning.cost import keep_values
from robustdist.pruning.gates import Gates, LearnedScores, fold
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.importance import Magnitude, gate_gradient, named_tensors
from robustdist.pruning.masks import mask_units
from robustdist.pruning.selection import Target, select
from tests.unit.pruning.written_groups import attention_groups, attention_net, conv_groups, conv_net


def data(net: nn.Module, seed: int = 0) -> Tensor:
    shape = (4, 5, 12) if hasattr(net, "block") else (4, 2, 4, 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(next(net.parameters()).dtype)


def tied_net() -> tuple[nn.Module, list[UnitGroup]]:
    """Two layers that share a weight, one of them used twice, and a transposed convolution."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 3, 1)
            self.up, self.tied = nn.ConvTranspose2d(3, 2, 2), nn.ConvTranspose2d(3, 2, 2)
            self.tied.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return (self.up(h) * self.tied(h.square()) + self.up(h + 1)).flatten(1)

    member = Member("up.weight", 0, torch.arange(3), "consumer")
    return Net(), [UnitGroup("first", "channels", 3, (Member("first.weight", 0, torch.arange(3), "producer"), member))]


NETS = {
    "conv": lambda: (conv_net(), conv_groups()),
    "heads": lambda: (attention_net(), attention_groups()),
    "tied": tied_net,
}


@pytest.mark.parametrize("name", NETS)
def test_the_gradient_of_gates_at_one_is_that_from_the_weights(name):
    net, groups = NETS[name]()
    net = net.double()
    with Gates(net, groups) as gates:
        net(data(net)).square().sum().backward()
        net(data(net, 1)).square().sum().backward()
        found = gates.gradients()
        assert not any(bool(value.any()) for value in gates.gradients().values())
    for group in groups:
        expected = gate_gradient(group, named_tensors(net))
        assert expected.norm() > 0.1
        torch.testing.assert_close(found[group.name], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["conv", "heads"])
def test_gates_at_zero_are_masked_units(name):
    net, groups = NETS[name]()
    net = net.double().eval()
    removed = {group.name: [0, 2] for group in groups}
    masked = copy.deepcopy(net)
    mask_units(masked, groups, removed)
    with Gates(net, groups) as gates:
        gates.set(keep_values(groups, removed))
        torch.testing.assert_close(net(data(net)), masked(data(net)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETS)
def test_folded_values_compute_the_same_as_gates(name):
    net, groups = NETS[name]()
    net = net.double().eval()
    values = {group.name: torch.linspace(0.2, 0.9, group.size).double() for group in groups}
    plain = net(data(net))
    with Gates(net, groups) as gates:
        gates.set(values)
        expected = net(data(net))
    assert (plain - expected).abs().max() > 0.01
    fold(net, groups, values)
    torch.testing.assert_close(net(data(net)), expected, rtol=1e-12, atol=1e-12)


def test_one_group_of_a_dimension_that_several_share():
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
    units = torch.tensor([-1, 0, -1, 1, -1])
    group = UnitGroup("0", "channels", 2, (Member("1.weight", 1, units, "consumer"),))
    x = torch.ones(1, 3).double()
    with Gates(net, [group]) as gates:
        gates.set({"0": torch.tensor([0.0, 2.0])})
        found = net(x)
    expected = net[1](net[0](x) * torch.tensor([1.0, 0, 1, 2, 1]).double())
    torch.testing.assert_close(found, expected)


def test_packed_attention_is_gated_once_for_query_key_and_value():
    net = nn.MultiheadAttention(4, 2, batch_first=True).double()
    group = UnitGroup("hidden", "hidden", 4, (Member("in_proj_weight", 1, torch.arange(4), "consumer"),))
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    z = torch.tensor([0.5, 1.0, 0.0, 2.0]).double()
    expected = net(x * z, x * z, x * z)[0]
    with Gates(net, [group]) as gates:
        gates.set({"hidden": z})
        torch.testing.assert_close(net(x, x, value=x)[0], expected)
    packed = []
    with Gates(net, [group]) as gates:
        net.register_forward_pre_hook(lambda part, args: packed.append(args[0] is args[1] is args[2]))
        net(x, x, x)[0].square().sum().backward()
        assert packed == [True]
        torch.testing.assert_close(gates.gradients()["hidden"], gate_gradient(group, named_tensors(net)))


def test_the_module_shows_no_trace_and_can_be_copied_and_saved():
    net, groups = conv_net().eval(), conv_groups()
    keys, plain = list(net.state_dict()), net(data(net))
    with Gates(net, groups) as gates:
        gates.set({"hidden": torch.full((5,), 0.5)})
        gated = net(data(net))
        twin = copy.deepcopy(net)
        assert torch.equal(twin(data(net)), gated)
        assert list(net.state_dict()) == keys
        torch.save(net, io.BytesIO())
        assert {name for name, _ in net.named_parameters()} == {name for name, _ in conv_net().named_parameters()}
    assert not torch.equal(gated, plain)
    for module in (net, twin):
        assert torch.equal(module(data(net)), plain)
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_an_attack_does_not_add_to_the_gradient_and_precision_follows_the_input():
    net, groups = conv_net().eval(), conv_groups()
    with Gates(net, groups) as gates:
        x = data(net).requires_grad_()
        torch.autograd.grad(net(x).sum(), x)
        assert not any(bool(value.any()) for value in gates.gradients().values())
        with torch.autocast("cpu", torch.bfloat16):
            assert net(data(net)).dtype == torch.bfloat16
        with torch.inference_mode():
            net(data(net))


def test_ranks_share_the_mean_in_one_message():
    def mean(rank: int) -> tuple[list[float], int, list[float]]:
        net, groups = conv_net().eval(), conv_groups()
        calls = []

        def reduce(row: Tensor) -> Tensor:
            calls.append(row.numel())
            dist.all_reduce(row)
            return row / 2

        with Gates(net, groups) as gates:
            net(data(net, rank)).square().sum().backward()
            local = torch.cat([value.grad for value in gates.values.values()]).tolist()
            found = torch.cat([*gates.gradients(reduce).values()]).tolist()
        return found, len(calls), local

    first, second = run_ranks(mean)
    assert first[:2] == second[:2]
    assert first[1] == 1
    assert first[0] == pytest.approx([(a + b) / 2 for a, b in zip(first[2], second[2], strict=True)], rel=1e-5)


# --- scores learned with gates


def train(scores: LearnedScores, rounds: int = 60) -> dict[str, list[int]]:
    """A net in which two of four hidden units are useless learns which; its weights stay as they are."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, bias=False))
    net[1].weight.data = torch.tensor([[1.0, -0.3, 0.8, 0.3]])
    net[0].weight.data[3] = net[0].weight.data[1]  # units 1 and 3 cancel, and are the larger ones
    net[0].bias.data[3] = net[0].bias.data[1]
    net.requires_grad_(False)
    groups = [UnitGroup("0", "ffn", 4, (Member("1.weight", 1, torch.arange(4), "consumer"),))]
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    y = net(x)
    with Gates(net, groups) as gates:
        for _ in range(rounds):
            removed = select(groups, {"0": scores.score(groups[0], {})}, target=Target.parse({"ffn": 2}), round_to=1)
            gates.set(keep_values(groups, removed))
            nn.functional.mse_loss(net(x), y).backward()
            scores.step(gates.gradients())
    return removed


@pytest.mark.parametrize("start", [[0.0, 0.0, 0.0, 0.0], [0.1, 0.9, 0.2, 0.8]])
@pytest.mark.parametrize("absolute", [False, True])
def test_learned_scores_find_the_useful_units_also_those_that_were_out(start, absolute):
    start = [value + 0.01 for value in start] if absolute else start
    scores = LearnedScores({"0": torch.tensor(start)}, lr=0.5, momentum=0.5, absolute=absolute)
    assert train(scores) == {"0": [1, 3]}


def test_steps_of_learned_scores_are_straight_through():
    scores = LearnedScores({"a": torch.tensor([1.0, -2.0])}, lr=0.1, momentum=0.5, absolute=True)
    for _ in range(2):
        scores.step({"a": torch.tensor([1.0, 1.0])})
    # velocities 1, 1.5 along the sign of the score
    torch.testing.assert_close(scores.values["a"], torch.tensor([0.75, -1.75]).double())
    group = UnitGroup("a", "ffn", 2, ())
    torch.testing.assert_close(scores.score(group, {}), torch.tensor([0.75, 1.75]).double())
    twin = LearnedScores({"a": torch.zeros(2)}, lr=0.1, momentum=0.5, absolute=True)
    twin.load_state_dict(scores.state_dict())
    for each in (scores, twin):
        each.step({"a": torch.tensor([0.5, -1.0])})
    assert torch.equal(twin.values["a"], scores.values["a"])


def test_where_learned_scores_start():
    net, groups = conv_net(), conv_groups()
    assert LearnedScores.movement(groups).values["conv2"].tolist() == [0.0] * 4
    hydra = LearnedScores.hydra(groups, named_tensors(net))
    expected = Magnitude().score(groups[1], named_tensors(net)).sqrt()
    torch.testing.assert_close(hydra.values["conv2"], expected / expected.mean())


# --- wrong input


def test_gates_that_nothing_comes_by_are_named():
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    group = UnitGroup("attention", "heads", 4, (Member("out_proj.weight", 1, torch.arange(4), "consumer"),))
    x = torch.randn(1, 3, 4)
    with Gates(net, [group]) as gates:
        net(x, x, x)[0].sum().backward()
        with pytest.raises(UsageError, match=r"group attention is read by out_proj\.weight, which no forward pass"):
            gates.gradients()


def test_other_wrong_input_is_named():
    tied = nn.ModuleDict({"embedding": nn.Embedding(3, 4), "head": nn.Linear(4, 3)})
    tied["head"].weight = tied["embedding"].weight
    members = (
        Member("embedding.weight", 1, torch.arange(4), "producer"),
        Member("head.weight", 1, torch.arange(4), "consumer"),
    )
    with pytest.raises(UsageError, match=r"embedding\.weight both makes and reads"):
        fold(tied, [UnitGroup("hidden", "hidden", 4, members)], {"hidden": torch.ones(4)})
    net = nn.MultiheadAttention(4, 2, kdim=3)
    group = UnitGroup("hidden", "hidden", 4, (Member("q_proj_weight", 1, torch.arange(4), "consumer"),))
    with pytest.raises(UsageError, match="one of three weights"):
        Gates(net, [group]).install()
    with pytest.raises(UsageError, match="no learned scores of these groups"):
        LearnedScores({"a": torch.zeros(2)}).load_state_dict({"values": {"a": torch.zeros(3)}})
