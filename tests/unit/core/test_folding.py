from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from robustdist.core.folding import (
    conv_norm_pairs,
    disturbed_norms,
    fixed_norms,
    folded_pair,
    input_only_norm,
)


def settle(module: nn.Module) -> nn.Module:
    """Give all batch norms statistics and parameters far from the identity."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for name in ("running_mean", "running_var", "weight", "bias"):
                value = getattr(part, name)
                if value is not None:
                    value.data = torch.rand_like(value) + (0.5 if name in ("running_var", "weight") else -0.5)
    return module


class Net(nn.Module):
    """conv -> norm -> ReLU -> mean, with the forward given."""

    def __init__(self, forward=None, conv=None, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3) if conv is None else conv
        self.norm = nn.BatchNorm2d(4) if norm is None else norm
        self.second = nn.Conv2d(4, 4, 1)
        self.second_norm = nn.BatchNorm2d(4)
        self._function = forward
        settle(self).eval()

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))).mean((2, 3)) if self._function is None else self._function(self, x)


X = torch.rand(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def pairs(net, x=X, mode="eval"):
    return [tuple(pair) for pair in conv_norm_pairs(net, lambda: net(x), mode)]


# --- the formula


@pytest.mark.parametrize(
    ("conv", "norm", "shape"),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (5, 3, 9)),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), (5, 3, 6, 6)),
        (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8, affine=False), (5, 4, 6, 6)),
        (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect", dilation=2), nn.BatchNorm2d(8, eps=0.1), (5, 4, 6, 6)),
        (nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4, momentum=None), (5, 2, 4, 4, 4)),
        (nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), (5, 3, 6, 6)),
    ],
)
def test_the_folded_convolution_equals_both(conv, norm, shape):
    net = settle(nn.Sequential(conv, norm)).double().eval()
    x = torch.rand(shape, dtype=torch.float64)
    assert pairs(net, x) == [("0", "1")]
    weight, bias = folded_pair(conv, norm)
    assert not weight.requires_grad
    assert not bias.requires_grad
    expected = net(x)
    assert (expected - conv(x)).abs().max() > 0.1
    folded = conv._conv_forward(x, weight, bias)
    assert torch.allclose(folded, expected, rtol=0, atol=1e-12)


# --- what is a pair


def test_all_pairs_of_a_net_are_found_by_name():
    net = Net(lambda net, x: net.second_norm(net.second(F.relu(net.norm(net.conv(x))))))
    assert pairs(net) == [("conv", "norm"), ("second", "second_norm")]


def shortcut(net, x):
    y = net.conv(x)
    return net.norm(y) + y


def view_beside(net, x):
    y = net.conv(x)
    return net.norm(y).mean() + y.view(-1)[0]


def gated(net, x):
    y = net.conv(x)
    return net.norm(y) * y.detach().sigmoid()


def output_returned(net, x):
    y = net.conv(x)
    return {"logits": net.norm(y), "features": y}


def output_kept(net, x):
    net.features = net.conv(x)
    return net.norm(net.features)


def inside_a_list(net, x):
    y = net.conv(x)
    return torch.stack([net.norm(y), y])


def conv_twice(net, x):
    return net.norm(net.conv(x)) + net.conv(x + 1)


def norm_twice(net, x):
    return net.norm(net.norm(net.conv(x)))


def through_something(net, x):
    return net.norm(F.relu(net.conv(x)))


def two_norms(net, x):
    y = net.conv(x)
    return net.norm(y) + net.second_norm(y)


def weight_read(net, x):
    return net.norm(net.conv(x)) * net.conv.weight.norm()


def statistics_read(net, x):
    return net.norm(net.conv(x)) * net.norm.running_var.mean()


def item_read(net, x):
    y = net.conv(x)
    return net.norm(y) * y[0, 0, 0, 0].item()


def norm_first(net, x):
    return net.second(net.norm(net.second(x)).relu()) if x.shape[1] == 4 else net.conv(x)


def not_called(net, x):
    return F.batch_norm(net.conv(x), net.norm.running_mean, net.norm.running_var)


@pytest.mark.parametrize(
    "forward",
    [
        shortcut,
        view_beside,
        gated,
        output_returned,
        output_kept,
        inside_a_list,
        conv_twice,
        norm_twice,
        through_something,
        two_norms,
        weight_read,
        statistics_read,
        item_read,
        norm_first,
        not_called,
    ],
)
def test_a_convolution_that_others_read_is_no_pair(forward):
    assert pairs(Net(forward)) == []


def test_reading_the_form_of_the_output_is_allowed():
    def forward(net, x):
        y = net.conv(x)
        assert y.dim() == 4
        assert y.device == x.device
        return net.norm(y).view(y.size(0), -1) * y.shape[1]

    assert pairs(Net(forward)) == [("conv", "norm")]


class OwnConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + 1


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


def without_statistics():
    return nn.BatchNorm2d(4, track_running_stats=False)


@pytest.mark.parametrize(
    "net",
    [
        Net(conv=OwnConv(3, 4, 3)),
        Net(norm=OwnNorm(4)),
        Net(norm=without_statistics()),
        Net(norm=nn.GroupNorm(2, 4)),
        Net(norm=nn.InstanceNorm2d(4, track_running_stats=True)),
        Net(conv=nn.ConvTranspose2d(3, 4, 3)),
        Net(conv=parametrizations.weight_norm(nn.Conv2d(3, 4, 3))),
        Net(conv=prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.5)),
        Net().to(torch.bfloat16),
    ],
)
def test_parts_that_compute_something_else_are_left_alone(net):
    assert pairs(net, X.to(net.second.weight.dtype)) == []


@pytest.mark.parametrize("part", ["conv", "norm"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_parts_with_hooks_are_left_alone(part, hook):
    net = Net()
    handle = getattr(net.get_submodule(part), hook)(lambda *_: None)
    assert pairs(net) == []
    handle.remove()
    assert pairs(net) == [("conv", "norm")]


def test_an_unbatched_input_meets_the_channels_elsewhere():
    net = settle(nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4))).eval()
    assert pairs(net, torch.rand(3, 5)) == []
    assert pairs(net, torch.rand(2, 3, 5)) == [("0", "1")]


def test_two_names_of_one_convolution_and_shared_weights():
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    assert pairs(settle(nn.Sequential(conv, norm, nn.Sequential(conv))).eval()) == []
    first, second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
    second.weight = first.weight
    assert pairs(settle(nn.Sequential(first, nn.BatchNorm2d(3), second)).eval()) == []


def test_mode_decides_which_norms_are_fixed():
    net = Net(lambda net, x: net.second_norm(net.second(net.norm(net.conv(x)))))
    net.train()
    net.norm.eval()
    assert [name for name, _ in fixed_norms(net, "train")] == ["norm"]
    assert pairs(net, mode="train") == [("conv", "norm")]
    assert [name for name, _ in fixed_norms(net, "eval")] == ["norm", "second_norm"]
    assert list(fixed_norms(net.half(), "eval")) == []  # numbers in half precision would be rounded once more


@pytest.mark.parametrize("fails", [False, True])
def test_the_search_leaves_nothing_behind(fails):
    def forward(net, x):
        y = net.norm(net.conv(x))
        if fails:
            raise ValueError("stop")
        return y

    net = Net(forward)
    before = [dict(vars(part)) for part in net.modules()]
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    if fails:
        with pytest.raises(ValueError, match="stop"):
            pairs(net)
    else:
        pairs(net)
    assert [vars(part).keys() for part in net.modules()] == [attributes.keys() for attributes in before]
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules()] == hooks
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.is_grad_enabled()


def random_net(draw):
    """Return eight layers and a forward with one or two shortcuts between them."""
    layers = [
        draw.choice([nn.Conv2d(3, 3, 3, padding=1, bias=draw.random() < 0.5), nn.BatchNorm2d(3), nn.ReLU()])
        for _ in range(8)
    ]
    joins = {draw.randrange(8): draw.randrange(8) for _ in range(2)}

    def forward(net, x):
        outputs = []
        for place, layer in enumerate(net):
            x = layer(x)
            outputs.append(x)
            if place in joins and joins[place] < place:
                x = x + outputs[joins[place]]
        return x

    return settle(nn.Sequential(*layers)).double().eval(), forward


def test_random_nets_compute_the_same_after_folding_what_was_found():
    """Property: whatever the order of layers and the shortcuts, folding every pair found changes nothing."""
    num_found = 0
    for seed in range(40):
        torch.manual_seed(seed)
        net, forward = random_net(random.Random(seed))
        x = torch.rand(2, 3, 5, 5, dtype=torch.float64)
        expected = forward(net, x)
        found = conv_norm_pairs(net, lambda net=net, forward=forward, x=x: forward(net, x), "eval")
        num_found += len(found)
        for pair in found:
            weight, bias = folded_pair(net[int(pair.conv)], net[int(pair.norm)])
            merged = nn.Conv2d(3, 3, 3, padding=1).double()
            merged.load_state_dict({"weight": weight, "bias": bias})
            net[int(pair.conv)], net[int(pair.norm)] = merged, nn.Identity()
        assert torch.allclose(forward(net, x), expected, rtol=0, atol=1e-10), seed
    assert num_found > 20


# --- what is not folded


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_for_its_input_alone_has_the_same_values_and_input_gradient(affine, dtype):
    norm = settle(nn.BatchNorm2d(4, affine=affine)).eval()
    if dtype == torch.float64:
        norm.double()
    x = torch.randn(3, 4, 5, 5).to(dtype).requires_grad_()
    upstream = torch.randn(3, 4, 5, 5).to(dtype)
    expected = norm(x)
    (expected_grad,) = torch.autograd.grad(expected, x, upstream)
    output = input_only_norm(norm)(x)
    (grad,) = torch.autograd.grad(output, x, upstream)
    assert torch.equal(output, expected)
    assert grad.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(grad, expected_grad, rtol=tolerance, atol=tolerance)


def test_a_norm_for_its_input_alone_keeps_neither_input_nor_parameters_in_the_graph():
    norm = settle(nn.BatchNorm2d(4)).eval()
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        output = input_only_norm(norm)(x)
    assert max(kept) == 4
    assert torch.autograd.grad(output.sum(), norm.weight, allow_unused=True) == (None,)


def test_disturbed_norms_are_far_from_the_identity_and_reproducible():
    norms = [nn.BatchNorm2d(50), nn.BatchNorm1d(50, affine=False)]
    values, again = disturbed_norms(norms, 3), disturbed_norms(norms, 3)
    assert {(id(norm), name) for norm, name in values} == {
        *((id(norms[0]), name) for name in ("running_mean", "running_var", "weight", "bias")),
        *((id(norms[1]), name) for name in ("running_mean", "running_var")),
    }
    for (norm, name), value in values.items():
        assert value.shape == (50,)
        assert torch.equal(value, again[norm, name])
        low, high = (0.5, 1.5) if name in ("running_var", "weight") else (-0.5, 0.5)
        assert low <= value.min() < low + 0.2
        assert high - 0.2 < value.max() <= high
    assert not torch.equal(values[norms[0], "running_mean"], values[norms[1], "running_mean"])
