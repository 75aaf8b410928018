"""Second derivatives of convolution and batch norm: torch's numbers, without its detours."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from robustdist.attacks import PGD
from robustdist.core.double_backward import CheapDoubleBackward, twice_differentiable
from robustdist.objectives import FastBAT, GradAlign

NETS = {
    "strided": (nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()), (5, 3, 9, 8)),
    "grouped": (nn.Sequential(nn.Conv2d(4, 8, 3, dilation=2, groups=2, bias=False), nn.Tanh()), (2, 4, 9, 9)),
    "depthwise": (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.Tanh()), (3, 4, 7, 7)),
    "one": (nn.Sequential(nn.Conv1d(3, 5, 3, stride=2), nn.BatchNorm1d(5), nn.Tanh(), nn.Conv1d(5, 4, 1)), (4, 3, 11)),
    "three": (nn.Sequential(nn.Conv3d(2, 3, 2, padding=(1, 0, 1)), nn.BatchNorm3d(3), nn.Tanh()), (2, 2, 4, 5, 4)),
    "same": (nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.Tanh()), (3, 3, 6, 6)),
    "norms": (
        nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Tanh(), nn.BatchNorm2d(3, track_running_stats=False)),
        (4, 3, 5, 5),
    ),
    "norm_first": (nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.ReLU(), nn.Conv2d(3, 4, 3)), (4, 3, 6, 6)),
    "pixels": (nn.Sequential(nn.Conv2d(4, 6, 1, stride=(2, 3), groups=2), nn.BatchNorm2d(6), nn.ReLU()), (3, 4, 7, 8)),
    "pixels_on_a_line": (nn.Sequential(nn.Conv1d(4, 3, 1, stride=2), nn.ReLU(), nn.Conv1d(3, 2, 2)), (3, 4, 9)),
    "in_place": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)), (2, 3, 7, 7)),
    "evaluated": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()).eval(), (3, 3, 6, 6)),
}


def derivatives(net, x, context):
    """The value, its input gradient, and all gradients of a function of both, and the buffers afterwards."""
    net, leaf = copy.deepcopy(net), x.clone().requires_grad_()
    with context:
        out = net(leaf)
    weights = torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view_as(out)
    (grad,) = torch.autograd.grad((out * weights).sum() + out.square().sum(), leaf, create_graph=True)
    (torch.linspace(1, 3, grad.numel(), dtype=x.dtype).view_as(grad) * grad.sin()).sum().add(out.sin().sum()).backward()
    second = [leaf.grad, *(parameter.grad for parameter in net.parameters())]
    return out.detach(), grad.detach(), second, list(net.buffers())


@pytest.mark.parametrize("kind", NETS)
def test_all_derivatives_are_those_of_torch(kind):
    net, shape = NETS[kind]
    net = copy.deepcopy(net).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape, dtype=torch.float64)
    value, grad, second, buffers = derivatives(net, x, CheapDoubleBackward())
    expected = derivatives(net, x, nullcontext())
    torch.testing.assert_close(value, expected[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grad, expected[1], rtol=1e-11, atol=1e-11)
    for ours, theirs in zip(second, expected[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(buffers, expected[3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_second_derivatives_equal_finite_differences():
    norm, conv = nn.BatchNorm2d(3).double(), nn.Conv2d(3, 2, 2).double()

    def function(x, gamma, weight):
        with CheapDoubleBackward():
            normed = F.batch_norm(x, None, None, gamma, norm.bias, training=True)
            return F.conv2d(normed.tanh(), weight, conv.bias)

    x = torch.randn(3, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, gamma, conv.weight))

    def input_gradient(x, gamma, weight):
        (grad,) = torch.autograd.grad(function(x, gamma, weight).sin().sum(), x, create_graph=True)
        return grad

    assert torch.autograd.gradcheck(input_gradient, (x, gamma, conv.weight))


class Masks(TorchDispatchMode):
    """Which gradients each backward pass of a convolution was asked for."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.masks.append(tuple(args[-1]))
        return func(*args, **(kwargs or {}))


def test_weight_gradients_are_taken_only_where_they_are_asked_for():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with CheapDoubleBackward():
        loss = net(x).square().sum()
    with Masks() as first:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert first.masks == [(True, False, False)] * 2
    with Masks() as second:
        grad.square().sum().backward()
    # two of the double backward, and those of the activations that the input gradient depends on
    assert second.masks.count((False, True, False)) == 4
    assert not any(bias for *_, bias in second.masks)


def test_a_gradient_of_the_weights_cannot_be_differentiated_in_silence():
    for net in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)):
        x = torch.randn(2, 3, 5, 5, requires_grad=True)
        with CheapDoubleBackward():
            loss = net(x).square().sum()
        (grad,) = torch.autograd.grad(loss, net.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate"):
            grad.square().sum().backward()


def test_autocast_is_left_to_torch():
    net, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), CheapDoubleBackward():
        assert net(x).dtype == torch.bfloat16
    with CheapDoubleBackward():
        assert net(x).dtype == torch.float32


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        tokens = x.flatten(1).view(len(x), -1, 8)
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def test_attention_is_written_out_where_it_has_to_be_differentiated_twice():
    net, x, y = Attending(), torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    leaf = x.clone().requires_grad_()
    (fused,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        fused.square().sum().backward()
    with twice_differentiable():
        loss = net(leaf).sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    grad.square().sum().backward()
    torch.testing.assert_close(grad, fused)
    for objective in (GradAlign(), FastBAT(0.05)):
        net.zero_grad()
        objective(net, x, y, attack=PGD(eps=0.1, steps=1)).backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in net.parameters())
