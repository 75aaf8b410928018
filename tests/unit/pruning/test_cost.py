"""Predicted parameters and multiply-accumulates are those of the net that is really small."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from robustdist.core.testing import toy_images
from robustdist.pruning.cost import CostModel, keep_values
from robustdist.pruning.groups import Member, UnitGroup
from tests.unit.pruning.written_groups import HEAD_DIM, WIDTH, attention_groups, attention_net, conv_groups, conv_net


def count(net: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Parameters, and torch's own count; attention as plain matrix products, which torch counts on a CPU too."""
    with torch.no_grad(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as c:
        net.eval()(x)
    return sum(p.numel() for p in net.parameters()), c.get_total_flops() // 2


def cut(net: nn.Module, groups: list[UnitGroup], removed: dict[str, list[int]]) -> nn.Module:
    """A copy without the units: every tensor indexed, layers told their new sizes."""
    net = copy.deepcopy(net)
    for group in groups:
        for member, keep in group.kept(removed.get(group.name, ())):
            tensor = net.get_parameter(member.tensor) if "running" not in member.tensor else None
            if tensor is not None:
                tensor.data = tensor.data.index_select(member.dim, keep.nonzero().flatten())
            else:
                layer, _, name = member.tensor.rpartition(".")
                buffers = net.get_submodule(layer)
                setattr(buffers, name, getattr(buffers, name)[keep])
    return net


@pytest.mark.parametrize(
    "removed", [{}, {"conv1": [1]}, {"conv1": [1], "conv2": [0, 3], "hidden": [4]}, {"conv1": [0, 2]}]
)
def test_of_a_convolutional_net(removed):
    net, groups, x = conv_net(), conv_groups(), torch.randn(2, 2, 4, 4)
    model = CostModel(net, groups, lambda: net(x))
    small = cut(net, groups, removed)
    assert (model.of(removed).params, model.of(removed).macs) == count(small, x)
    assert (model.dense.params, model.dense.macs) == count(net, x)


def test_heads_take_their_products_along():
    net, groups, x = attention_net(), attention_groups(), torch.randn(2, 7, WIDTH)
    model = CostModel(net, groups, lambda: net(x))
    small = cut(net, groups, {"block": [0, 2, 3]})
    found = model.of({"block": [0, 2, 3]})
    assert (found.params, found.macs) == count(small, x)
    assert model.dense.macs - found.macs == 3 * 2 * (7 * 4 * WIDTH * HEAD_DIM + 2 * 7 * 7 * HEAD_DIM)


@pytest.mark.parametrize("same", [True, False])
def test_torch_attention_with_one_or_three_input_weights(same):
    net = nn.MultiheadAttention(8, 2, kdim=None if same else 6, vdim=None if same else 6, batch_first=True)
    query, other = torch.randn(2, 5, 8), torch.randn(2, 3, 8 if same else 6)
    expected = 2 * (5 * 8 * 8 * 2 + 3 * 8 * (8 if same else 6) * 2 + 2 * 5 * 3 * 8)
    units = torch.arange(2).repeat_interleave(4)
    names = [("in_proj_weight", units.repeat(3))] if same else [(f"{name}_proj_weight", units) for name in "qkv"]
    rows = [Member(name, 0, rows, "producer") for name, rows in names]
    heads = UnitGroup("attention", "heads", 2, (*rows, Member("out_proj.weight", 1, units, "consumer")))
    model = CostModel(net, [heads], lambda: net(query, other, value=other))
    assert model.dense.macs == expected
    assert model.of({"attention": [1]}).macs == expected / 2


def test_layers_that_are_used_twice_shared_or_transposed():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(1, 4, 2, stride=2, groups=1)
            self.twice = nn.Conv2d(4, 4, 1)
            self.tied = nn.Conv2d(4, 4, 1)
            self.tied.weight = self.twice.weight

        def forward(self, x):
            return self.tied(self.twice(self.twice(self.up(x))))

    net, x = Net(), toy_images(2)[0]
    places = [("up.weight", 1), ("up.bias", 0), ("twice.weight", 0), ("twice.weight", 1), ("twice.bias", 0)]
    members = tuple(Member(name, dim, torch.arange(4), "norm") for name, dim in [*places, ("tied.bias", 0)])
    groups = [UnitGroup("up", "channels", 4, members)]
    model = CostModel(net, groups, lambda: net(x))
    for removed in ({}, {"up": [1, 2, 3]}):
        found = model.of(removed)
        assert (found.params, found.macs) == count(cut(net, groups, removed), x)


def test_the_expected_cost_is_the_mean_over_removals_and_has_a_gradient():
    net, groups, x = conv_net(), conv_groups(), torch.randn(1, 2, 4, 4)
    model = CostModel(net, groups, lambda: net(x))
    keep = {name: torch.full_like(value, 0.5) for name, value in keep_values(groups, {}).items()}
    keep["hidden"] = torch.tensor([1.0, 1, 0.25, 1, 0]).double().requires_grad_()
    params, macs = model.expected(keep)
    generator, total = torch.Generator().manual_seed(0), torch.zeros(2, dtype=torch.float64)
    for _ in range(400):
        drawn = {name: torch.bernoulli(value, generator=generator) for name, value in keep.items()}
        total += torch.stack(model.expected(drawn))
    torch.testing.assert_close(total / 400, torch.stack([params, macs]).detach(), rtol=0.05, atol=0)
    params.backward()
    # a unit of "hidden": half of its 8 x 16 inputs, a bias and three outputs
    torch.testing.assert_close(keep["hidden"].grad, torch.full((5,), 8 * 16 / 2 + 1 + 3).double())


def test_the_module_is_as_it_was():
    net = conv_net().train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    CostModel(net, conv_groups(), lambda: net(torch.randn(2, 2, 4, 4)))
    assert all(part.training for part in net.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not any(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules())


def test_attention_that_torch_would_fuse():
    net, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    model = CostModel(net, [], lambda: net(x))
    assert torch.backends.mha.get_fastpath_enabled()
    units = torch.arange(2).repeat_interleave(4)
    members = (
        Member("self_attn.in_proj_weight", 0, units.repeat(3), "producer"),
        Member("self_attn.out_proj.weight", 1, units, "consumer"),
    )
    heads = CostModel(net, [UnitGroup("self_attn", "heads", 2, members)], lambda: net(x))
    attention = 10 * 4 * 8 * 8 + 2 * 2 * 5 * 5 * 8
    assert heads.dense.macs == model.dense.macs == attention + 10 * 2 * 8 * 16
    assert heads.of({"self_attn": [0]}).macs == attention / 2 + 10 * 2 * 8 * 16
