"""What the option "auto" of the fast path measures and chooses."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.attacks import PGD
from robustdist.core import fast_path as module_under_test
from robustdist.core.fast_path import FastPath
from robustdist.core.trial import FastPathSettings, Trial
from tests.unit.core.fast_path_support import EVERYTHING, X, Y, make_net, prepared


@pytest.fixture
def net():
    return make_net()


def test_autocast_of_the_caller_keeps_casts_with_a_graph(net):
    """A cast that an attack left in autocast's cache must not cut the weights off from the update."""
    net.train()
    fast_path = prepared(net, **EVERYTHING | {"precision": "inherit"})
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            net(X)
        with fast_path.applied(net):
            x_adv = PGD(steps=1)(net, X, Y)
        loss = F.cross_entropy(net(x_adv), Y)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in net.parameters())


@pytest.fixture
def fixed_times(monkeypatch):
    """Let each way take a given time; the rest of the measurement is real."""

    def set_times(times):
        real = module_under_test.compare

        def compare(*args):
            trials, notes = real(*args)
            return [Trial(t.settings, times(t.settings), t.agreement) for t in trials], notes

        monkeypatch.setattr(module_under_test, "compare", compare)

    return set_times


def test_auto_counts_as_off_until_it_is_measured(net):
    fast_path = FastPath("auto", "auto", "auto")
    assert fast_path.chosen == FastPathSettings()
    with fast_path.applied(net):
        assert not torch.is_autocast_enabled("cpu")
        assert "weight" not in vars(net.conv1)


def test_auto_measures_all_combinations_and_says_so(net, fixed_times):
    fixed_times(lambda way: 2.0 - way.num_changes / 10)
    fast_path = prepared(net, precision="auto", channels_last="auto", fold_batch_norm="auto")
    assert len(fast_path.trials) == 8
    assert fast_path.chosen == FastPathSettings("bf16", True, True)
    text = str(fast_path)
    assert text.startswith(
        "forward passes of the attack: precision bf16 + channels_last + fold_batch_norm; "
        "1 of 3 batch norms folded into convolutions; measured per gradient"
    )
    assert "plain 2e+03 ms (100.0%)" in text
    assert "\n" not in text
    bf16 = next(trial for trial in fast_path.trials if str(trial.settings) == "precision bf16")
    assert 0.98 <= bf16.agreement < 1.0


def test_auto_keeps_what_is_not_beaten_by_five_per_cent(net, fixed_times):
    fixed_times(lambda way: 1.0 - way.num_changes / 100)
    assert prepared(net, channels_last="auto", fold_batch_norm="auto").chosen == FastPathSettings()


def test_what_is_set_is_not_measured(net, fixed_times):
    fixed_times(lambda way: 1.0)
    fast_path = prepared(net, precision="32", channels_last="auto", fold_batch_norm=True)
    assert {trial.settings for trial in fast_path.trials} == {
        FastPathSettings("32", False, True),
        FastPathSettings("32", True, True),
    }
    assert fast_path.chosen == FastPathSettings("32", False, True)


def test_bf16_is_no_candidate_where_it_is_at_work_or_weights_have_another_type(net):
    with torch.autocast("cpu", torch.bfloat16):
        assert prepared(net, precision="auto").trials == []
    net.double()
    fast_path = FastPath("auto")
    fast_path.prepare(net, X.double())
    assert (fast_path.trials, fast_path.chosen.precision) == ([], "inherit")


def test_channels_last_is_no_candidate_where_it_is_at_work(net):
    net.to(memory_format=torch.channels_last)
    fast_path = prepared(net, channels_last="auto")
    assert (fast_path.trials, fast_path.chosen.channels_last) == ([], False)


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 5)

    def forward(self, x):
        return self.linear(self.conv(x).view(len(x), -1))


def test_a_forward_that_needs_the_ordinary_order_keeps_it():
    fast_path = prepared(Viewing(), channels_last="auto")
    assert not fast_path.chosen.channels_last
    assert "channels_last is left out: view size is not compatible" in fast_path.notes[0]


def test_the_choice_of_another_process_is_adopted(net):
    fast_path = prepared(net, fold_batch_norm="auto")
    fast_path.adopt(FastPathSettings(fold_batch_norm=True))
    net.eval()
    expected = net(X)
    with fast_path.applied(net):
        assert "weight" in vars(net.conv1)
        assert torch.allclose(net(X), expected, rtol=1e-4, atol=1e-5)


def test_preparing_again_forgets_the_old_module(net):
    fast_path = prepared(net, fold_batch_norm=True)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    fast_path.prepare(other, X)
    assert (fast_path.num_folded, fast_path.num_norms, fast_path.notes) == (1, 1, [])
    with fast_path.applied(other):
        assert "weight" in vars(other[0])


@pytest.mark.parametrize("seed", range(5))
def test_attacks_are_the_same_up_to_rounding(seed):
    """Property: on any net of this kind an attack through a fast path finds what it finds without."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    layers, width = [], 3
    for _ in range(4):
        layers += [nn.Conv2d(width, 4, 3, padding=1, groups=1), nn.BatchNorm2d(4), nn.ReLU()]
        if draw.random() < 0.5:
            layers.pop(-2)
        width = 4
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 5)).double()
    attack, x = PGD(eps=0.1, steps=3), X.double()
    fast_path = FastPath(channels_last=True, fold_batch_norm=True)
    fast_path.prepare(net, x)
    expected = attack(net, x, Y)
    with fast_path.applied(net):
        assert torch.allclose(attack(net, x, Y), expected, rtol=0, atol=1e-9)
