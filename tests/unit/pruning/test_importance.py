"""Scores: each against a plain loop over channels, and what all of them must obey."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.importance import (
    CRITERIA,
    Criterion,
    Magnitude,
    Movement,
    Random,
    Taylor,
    gate_gradient,
    make_criterion,
    named_tensors,
    slimming_penalty,
)
from tests.unit.pruning.written_groups import attention_groups, attention_net, conv_groups, conv_net


def with_gradients(net: nn.Module, seed: int = 1, batch: int = 4) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(net.parameters()).dtype
    net.zero_grad()
    out = net(torch.randn(batch, 2, 4, 4, generator=generator).to(dtype))
    nn.functional.cross_entropy(out, torch.arange(batch) % 3).backward()
    return net


def scored(criterion: Criterion, net: nn.Module, groups: list[UnitGroup]) -> dict[str, Tensor]:
    tensors = named_tensors(net)
    criterion.observe(groups, tensors)
    return {group.name: criterion.score(group, tensors) for group in groups}


# --- each against a loop


@pytest.mark.parametrize("p", [1, 2])
def test_magnitude_is_the_mean_norm_of_all_slices_over_the_mean_of_the_group(p):
    net = conv_net()
    conv1, conv2, hidden = scored(Magnitude(p=p), net, conv_groups()).values()
    expected = []
    for unit in range(3):
        channels = [unit, unit + 3]
        slices = [
            w.detach() for w in (net.conv1.weight[channels], net.norm.weight[channels], net.conv2.weight[:, unit])
        ]
        expected.append(sum(float((s.double().abs() ** p).sum()) for s in slices) / 3)
    torch.testing.assert_close(conv1, torch.tensor(expected).double() / (sum(expected) / 3))
    expected = [
        float((net.conv2.weight.detach()[[u, u + 4]].double().abs() ** p).sum())
        + float((net.hidden.weight.detach().view(5, 8, 16)[:, [u, u + 4]].double().abs() ** p).sum())
        for u in range(4)
    ]
    torch.testing.assert_close(conv2, torch.tensor(expected).double() / (sum(expected) / 4))
    assert hidden.mean() == pytest.approx(1)


def test_bn_scale_takes_tied_batch_norms_as_one_group_and_is_what_the_penalty_shrinks():
    net = nn.ModuleDict({"a": nn.BatchNorm2d(2), "b": nn.BatchNorm2d(2), "c": nn.Conv2d(2, 1, 1)})
    net["a"].weight.data, net["b"].weight.data = torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 0.5])
    names = ("weight", "bias", "running_mean", "running_var")
    norms = [Member(f"{layer}.{name}", 0, torch.arange(2), "norm") for layer in "ab" for name in names]
    group = UnitGroup("a", "channels", 2, (*norms, Member("c.weight", 1, torch.arange(2), "consumer")))
    tensors = named_tensors(net)
    assert make_criterion("bn_scale").score(group, tensors).tolist() == [2.0, 1.25]
    penalty = slimming_penalty([group], tensors, lam=0.1)
    assert penalty.item() == pytest.approx(0.325)
    penalty.backward()
    torch.testing.assert_close(net["a"].weight.grad, torch.tensor([-0.05, 0.05]))
    with pytest.raises(UsageError, match="hidden has no batch norm"):
        make_criterion("bn_scale").score(conv_groups()[2], named_tensors(conv_net()))


def test_taylor_is_the_mean_square_of_the_gate_gradients_of_the_steps():
    net = conv_net()
    conv2 = conv_groups()[1]
    squared, absolute, moving = Taylor(), Taylor(absolute=True), Movement()
    gradients = []
    for seed in range(3):
        with_gradients(net, seed)
        product = (net.hidden.weight.double() * net.hidden.weight.grad.double()).detach()
        gradients.append(product.view(5, 2, 4, 16).sum((0, 1, 3)))
        for criterion in (squared, absolute, moving):
            criterion.observe([conv2], named_tensors(net))
    g = torch.stack(gradients)
    torch.testing.assert_close(squared.score(conv2, {}), (g**2).mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(absolute.score(conv2, {}), g.abs().mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moving.score(conv2, {}), -g.mean(0), rtol=1e-12, atol=0)


def test_a_shared_weight_counts_once():
    net = conv_net()
    net.again = nn.Linear(5, 3)
    net.again.weight = net.head.weight
    with_gradients(net)
    hidden = conv_groups()[2]
    twice = UnitGroup("hidden", "ffn", 5, (*hidden.members, Member("again.weight", 1, torch.arange(5), "consumer")))
    tensors = named_tensors(net)
    assert torch.equal(gate_gradient(twice, tensors), gate_gradient(hidden, tensors))
    assert torch.equal(Magnitude().score(twice, tensors), Magnitude().score(hidden, tensors))


# --- the family


@dataclass(frozen=True)
class Row:
    """What a criterion looks at: gradients; scale of the weights."""

    name: str
    gradients: bool = False
    permutes: bool = True


FAMILY = [
    Row("magnitude"),
    Row("bn_scale"),
    Row("taylor", gradients=True),
    Row("movement", gradients=True),
    Row("random", permutes=False),
]
GROUPS = {"bn_scale": slice(0, 1)}


def test_every_criterion_has_its_row():
    assert [row.name for row in FAMILY] == list(CRITERIA)


@pytest.mark.parametrize("row", FAMILY, ids=lambda row: row.name)
def test_family(row):
    groups = conv_groups()[GROUPS.get(row.name, slice(None))]
    criterion = make_criterion(row.name)
    assert criterion.needs_gradients is row.gradients
    net = with_gradients(conv_net())
    scores = scored(criterion, net, groups)
    for group in groups:
        assert scores[group.name].dtype == torch.float64
        assert scores[group.name].shape == (group.size,)
        assert len(set(scores[group.name].tolist())) == group.size

    # the state is plain and complete
    fresh = make_criterion(row.name)
    fresh.load_state_dict(criterion.state_dict())
    for rest in (criterion, fresh):
        with_gradients(net, seed=2)
        rest.observe(groups, named_tensors(net))
    for group in groups:
        assert torch.equal(fresh.score(group, named_tensors(net)), criterion.score(group, named_tensors(net)))

    # units that change places take their scores along
    order = torch.tensor([2, 0, 1])
    moved = conv_net()
    channels = torch.cat([order, order + 3])
    for name in ("conv1.weight", "conv1.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"):
        named_tensors(moved)[name].data = named_tensors(net)[name].data[channels].clone()
    moved.conv2.weight.data = net.conv2.weight.data[:, order].clone()
    again = scored(make_criterion(row.name), with_gradients(moved), groups[:1])["conv1"]
    expected = scores["conv1"][order] if row.permutes else scores["conv1"]
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-7)


def test_scores_of_magnitude_do_not_depend_on_the_scale_of_a_layer_and_those_of_taylor_not_on_rescaling():
    net, groups = conv_net().double(), conv_groups()
    magnitude, taylor = scored(Magnitude(), net, groups), scored(Taylor(), with_gradients(net), groups)
    scaled = conv_net().double()
    for name in ("conv2.weight", "conv2.bias"):
        named_tensors(scaled)[name].data *= 4
    scaled.hidden.weight.data /= 4  # the same function
    torch.testing.assert_close(scored(Taylor(), with_gradients(scaled), groups), taylor)
    scaled.hidden.weight.data *= 16
    torch.testing.assert_close(Magnitude().score(groups[1], named_tensors(scaled)), magnitude["conv2"])


def test_heads_are_scored_over_all_their_dimensions():
    net = attention_net()
    out = net(torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0)))
    out.square().sum().backward()
    (group,) = attention_groups()
    product = (net.block.out.weight * net.block.out.weight.grad).detach().double()
    expected = product.view(12, 4, 3).sum((0, 2))
    torch.testing.assert_close(gate_gradient(group, named_tensors(net)), expected, rtol=1e-5, atol=1e-6)


def test_random_units_depend_on_seed_and_group_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, second, _ = conv_groups()
    assert torch.equal(Random(seed=1).score(first, {}), Random(seed=1).score(first, {}))
    assert not torch.equal(Random(seed=1).score(first, {}), Random(seed=2).score(first, {}))
    assert not torch.equal(Random(seed=1).score(first, {}), Random(seed=1).score(second, {})[:3])
    assert torch.equal(state, torch.random.get_rng_state())


def test_ranks_with_different_data_agree():
    def scores(rank: int) -> list[list[float]]:
        net = nn.parallel.DistributedDataParallel(conv_net().eval())
        with_gradients(net, seed=10 + rank)
        criterion = Taylor()
        return [value.tolist() for value in scored(criterion, net.module, conv_groups()).values()]

    first, second = run_ranks(scores)
    assert first == second
    local = scored(Taylor(), with_gradients(conv_net().eval(), seed=10), conv_groups())
    assert first != [value.tolist() for value in local.values()]


# --- wrong input


def test_wrong_input_is_named():
    net = conv_net()
    with pytest.raises(UsageError, match=r"taylr.*magnitude"):
        make_criterion("taylr")
    with pytest.raises(UsageError, match="does not take q"):
        make_criterion("magnitude", q=2)
    with pytest.raises(UsageError, match="p=3"):
        Magnitude(p=3)
    with pytest.raises(UsageError, match="has seen no step of group conv1"):
        Taylor().score(conv_groups()[0], named_tensors(net))
    net.head.requires_grad_(False)
    with pytest.raises(UsageError, match=r"hidden is read by head\.weight, which is frozen"):
        Taylor().observe(conv_groups(), named_tensors(with_gradients(net)))
    with pytest.raises(UsageError, match="keep the method"):
        Taylor().load_state_dict({})
    with pytest.raises(UsageError, match="Random has no state"):
        Random().load_state_dict(Taylor().state_dict())
