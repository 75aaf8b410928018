"""ConAdv against copies of the model that stayed behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.attacks import PGD
from robustdist.core.testing import TinyNet, toy_images
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT, ConAdv

ATTACK = PGD(eps=0.1, steps=3)
LR = 0.2


def train(net, objective, steps, first=0):
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for step in range(first, first + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        objective(net, x, y, attack=ATTACK, step=step).backward()
        objective.after_backward()
        optimizer.step()


def batch(step):
    x, y = toy_images(8, seed=step)
    return x.double(), y


def new_net():
    torch.manual_seed(0)
    return TinyNet().double()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("stale", [0, 1, 3])
def test_the_attack_sees_the_weights_of_so_many_steps_ago(stale):
    ours, naive = new_net(), new_net()
    train(ours, ConAdv(stale, clean_weight=0.5), 6)
    behind = []
    for step in range(6):
        x, y = batch(step)
        behind.append(copy.deepcopy(naive))
        x_adv = ATTACK(behind[max(0, step - stale)], x, y, step=step)
        naive.zero_grad()
        (0.5 * F.cross_entropy(naive(x), y) + F.cross_entropy(naive(x_adv), y)).backward()
        with torch.no_grad():
            for parameter in naive.parameters():
                parameter -= LR * parameter.grad
    for one, other in zip(ours.parameters(), naive.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-12, rtol=0)


def test_without_staleness_it_is_dat_bit_for_bit():
    one, other = new_net(), new_net()
    train(one, ConAdv(stale=0), 4)
    train(other, DAT(clean_weight=1.0), 4)
    assert equal(one, other)


def test_a_resumed_training_goes_on_with_its_past():
    whole, part = new_net(), new_net()
    objective, first, second = ConAdv(2), ConAdv(2), ConAdv(2)
    train(whole, objective, 6)
    train(part, first, 3)
    state = first.state_dict()
    assert all(isinstance(values, torch.Tensor) for past in state["past"] for values in past.values())
    second.load_state_dict(copy.deepcopy(state))
    train(part, second, 3, first=3)
    assert equal(whole, part)
    objective.reset()
    assert objective.state_dict() == {"past": []}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.norm(x).flatten(1))


def test_running_statistics_are_those_of_the_clean_stream():
    x, y = toy_images(8)
    x = F.interpolate(x.mean(1, keepdim=True), (8, 8))
    torch.manual_seed(0)
    net = Normed()
    twin = copy.deepcopy(net)
    loss = ConAdv(1)(net, x, y, attack=ATTACK)
    loss.backward()
    twin(x)
    assert torch.equal(net.norm.running_mean, twin.norm.running_mean)
    assert torch.equal(net.norm.running_var, twin.norm.running_var)
    assert int(net.norm.num_batches_tracked) == 1
    # each stream is normalised by its own batch
    x_adv = ATTACK(twin, x, y)
    expected = F.cross_entropy(twin(x), y) + F.cross_entropy(twin(x_adv), y)
    assert torch.allclose(loss, expected, atol=1e-6)


def test_moved_weights_do_not_enter_the_past():
    net = new_net()
    objective = AWP(ConAdv(1), gamma=0.1)
    train(net, objective, 1)
    (past,) = objective.base.state_dict()["past"]
    for name, parameter in new_net().named_parameters():
        assert torch.equal(past[name], parameter)


def test_parameters_are_the_same_objects_also_after_an_exception():
    net = new_net()
    objective = ConAdv(1)
    train(net, objective, 2)
    before = [(parameter.data_ptr(), parameter.clone()) for parameter in net.parameters()]
    x, y = batch(0)
    with pytest.raises(UsageError, match="bounds"):
        objective(net, x + 5, y, attack=ATTACK)
    for parameter, (address, values) in zip(net.parameters(), before, strict=True):
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, values)


@pytest.mark.parametrize("options", [{"stale": -1}, {"stale": 1.0}, {"stale": True}, {"clean_weight": -1.0}])
def test_arguments_out_of_range_are_named(options):
    with pytest.raises(UsageError, match=f"^{next(iter(options))}="):
        ConAdv(**options)
