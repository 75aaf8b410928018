"""Strided convolutions of single pixels: the same function, at a seventh of the gradient's cost."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from robustdist.attacks import PGD
from robustdist.core.folding import conv_norm_pairs
from robustdist.core.strided import strided_pointwise

CPU = torch.device("cpu")


class Shortcut(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv, self.norm, self.head = conv, nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Strides(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.seen.append(tuple(args[3]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"stride": (3, 1), "groups": 2}, {"stride": 2, "bias": False}], ids=str
)
@pytest.mark.parametrize("shape", [(4, 4, 9, 8), (4, 7, 7)], ids=["batch", "image"])
def test_values_and_all_gradients_are_the_same(options, shape):
    conv = nn.Conv2d(4, 6, 1, **options).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = conv(x)
    with strided_pointwise(conv, CPU), Strides() as strides:
        found = conv(x)
    assert strides.seen == [(1, 1)]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    weights = torch.randn_like(expected)
    inputs = [x, *conv.parameters()]
    ours, theirs = (torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_attack_runs_so_and_leaves_nothing_behind():
    torch.manual_seed(0)
    net = Shortcut(nn.Conv2d(4, 6, 1, stride=2)).double().eval()
    seen = []
    net.conv.register_forward_hook(lambda part, args, out: seen.append((args[0].shape, out.shape)))
    x, y = torch.rand(5, 4, 8, 8, dtype=torch.float64), torch.arange(5) % 3
    with Strides() as strides:
        found = PGD(eps=0.1, step_size=0.03, steps=3)(net, x, y)
    assert strides.seen == [(1, 1)] * 3
    assert seen == [((5, 4, 8, 8), (5, 6, 4, 4))] * 3  # a hook sees what it always did
    assert "forward" not in vars(net.conv)
    own = copy.deepcopy(net)
    vars(own.conv)["forward"] = own.conv.forward  # the user's, so left alone
    torch.testing.assert_close(PGD(eps=0.1, step_size=0.03, steps=3)(own, x, y), found, rtol=0, atol=1e-12)


class _Subclass(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Conv2d(4, 6, 1, stride=2, padding=1),
        _Subclass(4, 6, 1, stride=2),
    ],
    ids=["stride 1", "three pixels", "padding", "subclass"],
)
def test_what_is_left_to_torch(conv):
    with strided_pointwise(conv, CPU):
        assert "forward" not in vars(conv)


def test_other_devices_and_compiled_modules_are_left_to_torch():
    net = Shortcut(nn.Conv2d(4, 6, 1, stride=2))
    with strided_pointwise(net, torch.device("meta")):
        assert "forward" not in vars(net.conv)
    net.compile(backend="eager")
    with strided_pointwise(net, CPU):
        assert "forward" not in vars(net.conv)


def test_its_batch_norm_still_folds():
    net = Shortcut(nn.Conv2d(4, 6, 1, stride=2)).eval()
    with strided_pointwise(net, CPU):
        pairs = conv_norm_pairs(net, lambda: net(torch.rand(2, 4, 6, 6)), "eval")
    assert [tuple(pair) for pair in pairs] == [("conv", "norm")]
