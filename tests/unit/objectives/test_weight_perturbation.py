"""AWP against its formula, and that it puts the weights back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD
from robustdist.errors import UsageError
from robustdist.objectives import AWP, FGSMRS, TRADES
from tests.unit.objectives.papers_support import (
    RANK,
    STEP,
    ConvNet,
    assert_close,
    attack,
    computed,
    fgsm_rs,
    kl,
    network,
    one_step,
    sign_steps,
    trades,
)


@pytest.mark.parametrize(
    ("base", "formula"), [(None, lambda x, y: fgsm_rs(x, y, 1.25)), (TRADES(), lambda x, y: trades(x, y, 6.0))]
)
@pytest.mark.parametrize("gamma", [0.01, 0.3])
def test_awp_takes_the_gradient_at_the_moved_weights(base, formula, gamma, batch):
    net = ConvNet().double()
    base = base if base is not None else FGSMRS()
    before = copy.deepcopy(net.state_dict())
    x, y = batch
    # the attack is that on the true weights
    true = copy.deepcopy(net)
    if isinstance(base, TRADES):
        clean = true(x).softmax(1).detach()
        x_adv = sign_steps(lambda x_adv: kl(clean, true(x_adv).softmax(1)).sum(), x)

        def outer(net: nn.Module) -> Tensor:
            p = net(x).softmax(1)
            return -p[range(len(y)), y].log().mean() + 6.0 * kl(p, net(x_adv).softmax(1)).mean()

    else:
        x_adv = one_step(true, x, y, 1.25)

        def outer(net: nn.Module) -> Tensor:
            return F.cross_entropy(net(x_adv), y)

    torch.testing.assert_close(outer(true), formula(x, y)(true))
    moved = copy.deepcopy(net)
    outer(true).backward()
    for name in ("conv.weight", "head.weight"):
        v, theta = true.get_parameter(name).grad, true.get_parameter(name).detach()
        moved.get_parameter(name).data.copy_(theta + gamma * theta.norm() / v.norm() * v)

    loss, gradient = computed(AWP(base, gamma), net, batch)

    assert_close([loss], [outer(moved).detach()])
    assert_close(gradient, list(torch.autograd.grad(outer(moved), list(moved.parameters()))))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_awp_moves_the_weights_and_nothing_else_until_the_backward_pass_is_over(batch):
    net = ConvNet().double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    objective = AWP(gamma=0.05)
    loss = objective(net, *batch, attack=attack())

    for name, value in net.state_dict().items():
        if name in ("conv.weight", "head.weight"):
            assert float((value - before[name]).norm() / before[name].norm()) == pytest.approx(0.05)
        else:
            assert torch.equal(value, before[name]), name
    loss.backward()
    objective.after_backward()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
def test_awp_leaves_frozen_weights_alone(batch, frozen):
    net = ConvNet().double()
    net.conv.weight.requires_grad_(not frozen)
    before = net.conv.weight.detach().clone()
    AWP(gamma=0.05)(net, *batch, attack=attack())
    assert torch.equal(net.conv.weight, before) == frozen


def test_awp_without_size_is_its_base_and_touches_nothing(batch):
    net = ConvNet().double()
    net.conv.weight.data[0, 0, 0, 0] = -0.0
    versions = [parameter._version for parameter in net.parameters()]
    results = [computed(objective, net, batch) for objective in (AWP(FGSMRS(), gamma=0.0), FGSMRS())]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))
    assert [parameter._version for parameter in net.parameters()] == versions


def test_awp_restores_at_the_next_call_what_an_exception_left(batch):
    net = ConvNet().double()
    before = copy.deepcopy(net.state_dict())
    objective = AWP(gamma=0.05)
    _, expected = computed(AWP(gamma=0.05), net, batch)
    objective(net, *batch, attack=attack(), rank=RANK, step=STEP)  # nobody calls backward
    assert not torch.equal(net.head.weight, before["head.weight"])
    _, gradient = computed(objective, net, batch)
    assert all(torch.equal(one, other) for one, other in zip(gradient, expected, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_awp_restores_when_the_second_pass_raises(batch):
    net = ConvNet().double()
    before = copy.deepcopy(net.state_dict())
    calls = []

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            assert not torch.equal(net.head.weight, before["head.weight"])
            raise ArithmeticError("on purpose")
        return F.cross_entropy(logits, y)

    with pytest.raises(ArithmeticError, match="on purpose"):
        AWP(gamma=0.05)(net, *batch, attack=attack(), loss_fn=loss_fn)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_awp_moves_the_weights_that_autocast_has_cast():
    net = network(6, 9, 4).float()
    x, y = torch.rand(5, 1, 2, 3), torch.tensor([0, 3, 1, 1, 2])

    def gradient(gamma: float) -> Tensor:
        net.zero_grad()
        objective = AWP(gamma=gamma)
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(net, x, y, attack=attack())
        loss.backward()
        objective.after_backward()
        return net[1].weight.grad.clone()

    assert float((gradient(0.5) - gradient(0.0)).abs().max()) > 1e-3


def test_awp_moves_nothing_by_a_gradient_that_overflowed():
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    x, y = torch.rand(5, 1, 2, 3), torch.tensor([0, 3, 1, 1, 2])
    AWP(gamma=0.05)(net, x, y, attack=attack(), loss_fn=lambda logits, y: F.cross_entropy(logits, y) * float("inf"))
    assert all(bool(torch.isfinite(value).all()) for value in net.state_dict().values())


def test_awp_counts_the_statistics_of_the_pass_that_is_trained_on(batch):
    x, y = batch
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(x.shape[1]), torch.nn.Flatten(), torch.nn.LazyLinear(5)).to(x.dtype)
    net(x)
    net[0].reset_running_stats()
    objective = AWP(gamma=0.1)
    objective(net, x, y, attack=PGD(eps=0.1, steps=1)).backward()
    objective.after_backward()
    assert int(net[0].num_batches_tracked) == 1


def test_awp_names_a_module_without_weights_to_move(batch):
    x, y = batch
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x[0].numel(), 5)).to(x.dtype)
    net[1].weight.requires_grad_(False)
    with pytest.raises(UsageError, match="the module has none: unfreeze some"):
        AWP()(net, x, y, attack=PGD(eps=0.1, steps=1))


@pytest.mark.parametrize(("progress", "moves"), [(0.1, False), (0.25, False), (0.26, True), (1.0, True)])
def test_awp_leaves_the_weights_where_they_are_during_its_warm_up(batch, progress, moves):
    objective = AWP(TRADES(), gamma=0.05, warm_up=0.25)
    assert objective.follows_progress
    net = ConvNet().double()
    before = net.conv.weight.detach().clone()
    loss = objective(net, *batch, attack=attack(), rank=RANK, step=STEP, progress=progress)
    assert torch.equal(net.conv.weight, before) != moves
    objective.after_backward()
    expected, _ = computed(AWP(TRADES(), gamma=0.05) if moves else TRADES(), net, batch)
    assert torch.equal(loss.detach(), expected)


@pytest.mark.parametrize("warm_up", [-0.1, 1.0, 10])
def test_a_warm_up_that_is_no_share_is_refused(warm_up):
    with pytest.raises(UsageError, match=r"10 of 200 epochs are 0\.05"):
        AWP(warm_up=warm_up)
