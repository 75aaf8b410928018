"""Guards leave a module and the process exactly as they found them."""

from __future__ import annotations

import random
from collections import namedtuple
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from robustdist.core.guard import (
    forked_rng,
    frozen_parameters,
    module_mode,
    ordinary_attributes,
    ordinary_tensors,
    pure,
    unchanged_buffers,
)

CPU = torch.device("cpu")


def expect_error(raises: bool):
    return pytest.raises(ArithmeticError, match="inside") if raises else nullcontext()


def leave(raises: bool) -> None:
    if raises:
        raise ArithmeticError("inside")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)))


def modes(module: nn.Module) -> list[bool]:
    return [child.training for child in module.modules()]


# --- module_mode


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_modes_of_all_submodules_come_back(mode, raises):
    net = network().train()
    net[1].eval()
    net[2][1].eval()
    before = modes(net)
    inside = []
    with expect_error(raises), module_mode(net, mode):
        inside = modes(net)
        net.train()
        leave(raises)
    assert modes(net) == before
    assert inside == (before if mode == "train" else [False] * len(before))


def test_a_module_in_eval_mode_with_a_part_in_train_mode_stays_so():
    net = network().eval()
    net[2][0].train()
    with module_mode(net, "eval"):
        assert not any(modes(net))
    assert modes(net) == [False, False, False, False, True, False]


def test_mode_switches_that_do_more_are_not_triggered():
    class MergesOnEval(nn.Linear):
        merged = 0

        def train(self, mode: bool = True):
            if not mode:
                self.weight.data += 1.0  # as low-rank adapters do
                self.merged += 1
            return super().train(mode)

    net = nn.Sequential(MergesOnEval(2, 2))
    weight = net[0].weight.clone()
    with module_mode(net, "eval"):
        assert net[0].training is False
    assert net[0].merged == 0
    assert torch.equal(net[0].weight, weight)


# --- unchanged_buffers


@pytest.mark.parametrize("raises", [False, True])
def test_buffers_are_restored_bitwise_and_stay_the_same_objects(raises):
    net = network().train()
    net[1].running_mean.fill_(float("nan"))
    net.register_buffer("replaced", torch.arange(3))
    net.register_buffer("empty", None)
    net.register_buffer("shared", net[2][1].running_var)
    before = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers(remove_duplicate=False)}
    with expect_error(raises), unchanged_buffers(net):
        net[:1](torch.randn(5, 3))
        net[2](torch.randn(5, 4))
        net[1].running_mean.zero_()
        net.replaced = torch.zeros(7)
        net.empty = torch.ones(1)
        assert not torch.equal(net[2][1].running_var, before["2.1.running_var"][1])
        assert int(net[2][1].num_batches_tracked) == 1
        leave(raises)
    after = dict(net.named_buffers(remove_duplicate=False))
    assert after.keys() == before.keys()
    for name, (buffer, values) in before.items():
        assert after[name] is buffer
        torch.testing.assert_close(buffer, values, rtol=0, atol=0, equal_nan=True)
    assert net.empty is None


def test_untouched_buffers_are_not_written():
    """A write would bump the version counter and break a backward that is still to come."""
    net = nn.BatchNorm1d(4).eval()
    version = net.running_mean._version
    with unchanged_buffers(net):
        net(torch.randn(2, 4))
    assert net.running_mean._version == version


# --- forked_rng


def draw() -> list:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]


@pytest.mark.parametrize("raises", [False, True])
def test_global_generators_continue_as_if_nothing_had_happened(raises):
    def run(disturb: bool) -> list:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        np.random.randn()  # leaves a cached second value behind
        drawn = draw()
        if disturb:
            with expect_error(raises), forked_rng(CPU, 5):
                draw()
                torch.manual_seed(0)
                random.seed(0)
                np.random.seed(0)
                leave(raises)
        return [*drawn, *draw(), np.random.randn()]

    assert run(True) == run(False)


def test_streams_inside_follow_the_seed_alone():
    def inside(seed: int, outside: int) -> list:
        torch.manual_seed(outside)
        random.seed(outside)
        np.random.seed(outside)
        with forked_rng(CPU, seed):
            return draw()

    large = 2**63 - 1
    assert inside(large, 1) == inside(large, 2)
    assert all(a != b for a, b in zip(inside(large, 1), inside(large - 1, 1), strict=True))


# --- frozen_parameters


@pytest.mark.parametrize("raises", [False, True])
def test_backward_inside_reaches_no_weight(raises):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].weight.requires_grad_(False)
    net[1].weight.grad = torch.full((3, 3), 2.0)
    grad = net[1].weight.grad
    with expect_error(raises), frozen_parameters(net):
        x = torch.ones(2, 3, requires_grad=True)
        net(x).sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is None for parameter in net.parameters())
        net[0].bias.grad = torch.ones(3)
        leave(raises)
    assert [parameter.requires_grad for parameter in net.parameters()] == [False, True, True, True]
    assert [parameter.grad is None for parameter in net.parameters()] == [True, True, False, True]
    assert net[1].weight.grad is grad
    assert torch.equal(grad, torch.full((3, 3), 2.0))


@pytest.mark.parametrize("inside", [False, True])
def test_weights_made_in_inference_mode_are_no_obstacle(inside):
    with torch.inference_mode():
        net = nn.Linear(3, 3)
    with torch.inference_mode(inside), frozen_parameters(net):
        pass
    assert all(parameter.requires_grad for parameter in net.parameters())


# --- inference tensors


def test_ordinary_tensors_copies_what_autograd_refuses_and_nothing_else():
    pair = namedtuple("pair", ["left", "right"])
    with torch.inference_mode():
        made = torch.arange(3.0)
        weight = nn.Parameter(torch.ones(2))
    plain = torch.arange(2.0)
    for value in (plain, [plain, 1], (plain, "a"), {"a": plain, "b": None}, pair(plain, 2), 7, None, "text"):
        assert ordinary_tensors(value) is value
    nested = {"x": [made, (made, plain)], "y": pair(made, 1), "z": plain}
    copied = ordinary_tensors(nested)
    assert not copied["x"][0].is_inference()
    assert not copied["x"][1][0].is_inference()
    assert isinstance(copied["x"], list)
    assert isinstance(copied["x"][1], tuple)
    assert isinstance(copied["y"], pair)
    assert torch.equal(copied["y"].left, torch.arange(3.0))
    assert copied["z"] is plain
    assert copied["x"][1][1] is plain
    assert nested["x"][0] is made  # the original is not changed
    weight_copy = ordinary_tensors(weight)
    assert isinstance(weight_copy, nn.Parameter)
    assert weight_copy.requires_grad
    assert not weight_copy.is_inference()


@pytest.mark.parametrize("raises", [False, True])
def test_attributes_made_in_inference_mode_are_copied_for_a_while(raises):
    with torch.inference_mode():
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        net.table = torch.ones(3)
        net.tables = (torch.ones(3), 1)
        net.by_length = {3: torch.ones(3)}
        net.recomputed = torch.ones(3)
        net.collected = [torch.ones(3)]
    kept = torch.zeros(1)
    net.kept = kept
    held = [net.table, net.tables, net.by_length, net.by_length[3], net.collected, *net.parameters(), *net.buffers()]
    values = net[0].running_mean.clone()

    def current() -> list:
        return [
            net.table,
            net.tables,
            net.by_length,
            net.by_length[3],
            net.collected,
            *net.parameters(),
            *net.buffers(),
        ]

    with expect_error(raises), ordinary_attributes(net):
        assert not net.table.is_inference()
        assert isinstance(net[1].weight, nn.Parameter)
        assert net.kept is kept
        assert (
            net.collected is held[4]
        )  # a test epoch's results: copying them at every attack would cost memory and time
        x = torch.ones(2, 3, requires_grad=True)
        net(x * net.table * net.tables[0] * net.by_length[3]).sum().backward()
        assert x.grad is not None
        new = net.recomputed = torch.zeros(5)
        leave(raises)
    assert all(now is then for now, then in zip(current(), held, strict=True))
    assert torch.equal(net[0].running_mean, values)
    assert net.recomputed is new


# --- pure


@pytest.mark.parametrize("outer", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_pure_enables_gradients_in_every_context_and_returns_to_it(outer):
    net = network()
    with outer():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with pure(net, "eval", CPU, 0):
            assert not any(modes(net))
            x = torch.ones(2, 3, requires_grad=True)
            (grad,) = torch.autograd.grad(net(x).sum(), x)
            assert not grad.is_inference()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert all(modes(net))


def test_pure_in_train_mode_restores_statistics_and_random_states():
    net = network().train()
    before = {name: values.clone() for name, values in net.state_dict().items()}
    state = torch.get_rng_state()

    def outputs(seed: int) -> torch.Tensor:
        with pure(net, "train", CPU, seed):
            return net(torch.arange(12.0).view(4, 3))

    first = outputs(1)
    assert torch.equal(first, outputs(1))  # dropout and statistics start from the same point
    assert not torch.equal(first, outputs(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values, before[name]) for name, values in net.state_dict().items())
