"""A snapshot is apart from the module it was taken of, and brings all of it back."""

import copy

import pytest
import torch
import torch.nn.functional as F

from robustdist.core.snapshot import on_cpu, restore_snapshot, take_snapshot
from robustdist.core.testing import TinyNet, toy_images


def train(net, optimizer, steps):
    x, y = toy_images(8)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def everything(net, optimizer):
    buffers = {f"buffer {name}": buffer for name, buffer in net.named_buffers()}
    moments = {
        f"{place} {name}": torch.as_tensor(value)
        for place, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }
    return copy.deepcopy({**dict(net.named_parameters()), **buffers, **moments})


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def trained():
    net = TinyNet(batch_norm=True)
    net.register_buffer("hidden", torch.tensor([1.0]), persistent=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, optimizer, 2)
    return net, optimizer


def test_training_on_and_going_back_leaves_nothing(trained):
    net, optimizer = trained
    before, snapshot = everything(net, optimizer), take_snapshot(net, [optimizer])
    addresses = [parameter.data_ptr() for parameter in net.parameters()]
    for _ in range(2):  # the snapshot can be used again
        net.hidden.add_(1)
        train(net, optimizer, 3)
        assert not any(torch.equal(before[name], value) for name, value in everything(net, optimizer).items())
        restore_snapshot(snapshot, net, [optimizer])
        assert equal(before, everything(net, optimizer))
    # in place: DDP and compiled code hold these tensors
    assert [parameter.data_ptr() for parameter in net.parameters()] == addresses
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_next_step_is_the_one_that_would_have_followed(trained):
    net, optimizer = trained
    snapshot = take_snapshot(net, [optimizer])
    train(net, optimizer, 1)
    expected = everything(net, optimizer)
    train(net, optimizer, 4)
    restore_snapshot(snapshot, net, [optimizer])
    train(net, optimizer, 1)
    assert equal(expected, everything(net, optimizer))


def test_options_of_the_optimiser_are_not_part_of_it(trained):
    net, optimizer = trained
    snapshot = take_snapshot(net, [optimizer])
    optimizer.param_groups[0]["lr"] = 0.001
    restore_snapshot(snapshot, net, [optimizer])
    assert optimizer.param_groups[0]["lr"] == 0.001


def test_copies_share_nothing():
    original = {"a": [torch.zeros(2), (torch.zeros(1), "word")], "b": 3}
    copied = on_cpu(original)
    original["a"][0].add_(1)
    original["a"][1][0].add_(1)
    assert torch.equal(copied["a"][0], torch.zeros(2))
    assert torch.equal(copied["a"][1][0], torch.zeros(1))
    assert copied["a"][1][1] == "word"
    assert copied["b"] == 3
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert type(on_cpu(parameter)) is torch.Tensor
