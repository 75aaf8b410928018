"""Bit controllers: what they decide, that they decide alike everywhere, and that they go on where they stopped."""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from robustdist import UsageError
from robustdist.comm import BitController, BitSchedule, FixedBits, MQGrad, make_controller
from robustdist.core.rng import derive_seed
from robustdist.core.testing import run_ranks


def feed(controller: BitController, observations: list[tuple[float, float, float]]) -> list[int]:
    return [controller.observe(loss, compute_seconds=t, comm_seconds=c) for loss, t, c in observations]


def script(steps: int, seed: int) -> list[tuple[float, float, float]]:
    """Noisy falling losses and unsteady times."""
    draws = random.Random(seed)
    return [(3 * 0.99**k + draws.gauss(0, 0.3), draws.uniform(0.05, 0.1), draws.uniform(0, 0.3)) for k in range(steps)]


def train(controller: MQGrad, slope: Callable[[int], float], seconds_per_bit: float, steps: int) -> list[int]:
    """A loss that falls by ``slope(bits)`` per step and starts anew at 0; return the bits of every step."""
    loss, used = 3.0, []
    for _ in range(steps):
        bits = controller.bits
        used.append(bits)
        loss = loss - slope(bits) if loss > slope(bits) else 3.0
        controller.observe(loss, compute_seconds=0.1, comm_seconds=seconds_per_bit * bits)
    return used


def average(used: list[int]) -> float:
    """Mean bits of the second half."""
    return sum(used[len(used) // 2 :]) / (len(used) - len(used) // 2)


# --- MQGrad against a derivation with autograd and numpy


def naive(
    observations, low=2, high=8, T=5, r=0.9, gamma=0.9, alpha=0.05, eps=0.1, monotone=False, seed=0, measured=False
):
    """SARSA as the paper and the authors' program have it, an interval at a time."""
    net = nn.Sequential(nn.Linear(T, 30), nn.Tanh(), nn.Linear(30, high - low + 1)).double()
    generator = torch.Generator().manual_seed(derive_seed(seed, "mqgrad weights"))
    for layer, std in ((net[0], 0.05), (net[2], 5e-5)):
        drawn = torch.randn(layer.weight.shape, dtype=torch.float64, generator=generator)
        layer.weight.data = std * drawn
        layer.bias.data.zero_()
    bits, decided = low, []
    loss, compute, per_bit = observations[0][0], observations[0][1], observations[0][2] / bits
    s = [loss] * T
    for k in range(len(observations) // T):
        window, times = [], []
        for L, t, c in observations[k * T : (k + 1) * T]:
            loss, compute, per_bit = r * loss + (1 - r) * L, r * compute + (1 - r) * t, r * per_bit + (1 - r) * c / bits
            window.append(loss)
            times.append(t + c)
        time = (
            np.mean(times) / ((compute + per_bit) / 10)
            if measured
            else (10 * (compute + bits * per_bit) / (compute + per_bit))
        )
        reward = -300 * np.polyfit(np.arange(T), window, 1)[0] / time
        with torch.no_grad():
            q = net(torch.tensor(window, dtype=torch.float64))
        options = [b for b in ((bits, bits + 1) if monotone else (bits - 1, bits, bits + 1)) if low <= b <= high]
        best = bits
        for b in options:
            if q[b - low] > q[best - low]:
                best = b
        draws = random.Random(derive_seed(seed, "mqgrad", k))
        if draws.random() < eps:
            best = options[-1] if monotone else draws.choice(options)
        value = net(torch.tensor(s, dtype=torch.float64))[bits - low]
        gradients = torch.autograd.grad(value, list(net.parameters()))
        delta = reward + gamma * float(q[best - low]) - value.item()
        step = min(alpha, 1 / sum(float(gradient.square().sum()) for gradient in gradients))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.data += step * delta * gradient
        s, bits = window, best
        decided.append(bits)
    return decided, net


@pytest.mark.parametrize(
    ("options", "derived"),
    [
        ({"exploration": 0.4}, {"eps": 0.4}),
        ({"monotone": True, "seed": 3}, {"monotone": True, "seed": 3}),
        (
            {"interval": 3, "gamma": 0.5, "exploration": 0.5, "min_bits": 3, "max_bits": 6, "reward": "measured"},
            {"T": 3, "gamma": 0.5, "eps": 0.5, "low": 3, "high": 6, "measured": True},
        ),
        ({"smoothing": "1/2", "learning_rate": 0.2, "seed": 7}, {"r": 0.5, "alpha": 0.2, "seed": 7}),
    ],
    ids=str,
)
def test_decisions_and_weights_equal_the_derivation(options, derived):
    observations = script(600, seed=1)
    controller = MQGrad(**options)
    bits = feed(controller, observations)
    expected, net = naive(observations, **derived)
    assert bits[controller.interval - 1 :: controller.interval] == expected
    assert len(set(expected)) > 2
    weights = controller.state_dict()["weights"]
    for weight, parameter in zip(weights, net.parameters(), strict=True):
        torch.testing.assert_close(weight, parameter.data, rtol=1e-9, atol=1e-12)
        assert float(weight.abs().max()) < 10  # without the bound on a step it is 1e31


def test_bits_grow_where_that_pays_and_only_there():
    settings = {"gamma": 0.0, "smoothing": 0.0, "exploration": 0.5}
    pays = average(train(MQGrad(**settings), lambda bits: 0.001 * bits, 0.0, 3000))
    costs = average(train(MQGrad(**settings), lambda bits: 0.001, 1.0, 3000))
    assert pays > 6
    assert costs < 3.5


def test_the_monotone_policy_never_takes_bits_away_and_stays_in_range():
    bits = feed(MQGrad(monotone=True), script(1500, seed=2))
    assert bits == sorted(bits)
    assert (bits[0], bits[-1]) == (2, 8)
    assert {later - earlier for earlier, later in itertools.pairwise(bits)} == {0, 1}
    assert set(feed(MQGrad(3, 3), script(50, seed=2))) == {3}


# --- what all of them promise


def test_losses_that_are_not_finite_leave_no_trace():
    clean, disturbed = MQGrad(), MQGrad()
    observations = script(400, seed=4)
    bits = feed(clean, observations)
    found = []
    for place, observation in enumerate(observations):
        if place % 3 == 0:
            bad = [math.nan, math.inf, -math.inf][place % 9 // 3]
            before = disturbed.bits
            assert feed(disturbed, [(bad, 0.1, 0.1), (1.0, bad, 0.1), (1.0, 0.1, bad)]) == [before] * 3
        found += feed(disturbed, [observation])
    assert found == bits
    huge = MQGrad()
    assert set(feed(huge, [(loss * 1e200, t, c) for loss, t, c in observations])) <= set(range(2, 9))
    assert all(bool(torch.isfinite(weight).all()) for weight in huge.state_dict()["weights"])


def test_times_that_are_zero_decide_nothing():
    assert feed(MQGrad(), [(loss, 0.0, 0.0) for loss, _, _ in script(100, seed=1)])[-1] in range(2, 9)


@pytest.mark.parametrize(
    "make",
    [lambda: MQGrad(seed=5), lambda: MQGrad(reward="measured"), lambda: BitSchedule({0: 8, 7: 4, 300: 2}), FixedBits],
)
@pytest.mark.parametrize("place", [0, 103])
def test_a_resumed_controller_decides_as_one_that_went_on(make, place):
    observations = script(400, seed=6)
    whole = feed(make(), observations)
    first, second = make(), make()
    bits = feed(first, observations[:place])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    feed(first, observations[:20])  # what was saved does not change
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.bits == (bits[-1] if bits else make().bits)
    assert bits + feed(second, observations[place:]) == whole


def test_the_global_generators_are_left_alone():
    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate()
    feed(MQGrad(exploration=0.5), script(100, seed=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_ranks_that_share_averages_decide_alike():
    def run(rank: int) -> list[int]:
        controller, bits = MQGrad(exploration=0.3), []
        for observation in script(300, seed=rank):
            shared: Tensor = torch.tensor(observation, dtype=torch.float64)
            dist.all_reduce(shared)
            bits += feed(controller, [tuple((shared / 2).tolist())])
        return bits

    first, second = run_ranks(run)
    assert first == second
    assert len(set(first)) > 2


def test_schedules_and_names():
    controller = make_controller("schedule", schedule={3: 4, 0: 8, 5: 2})
    assert [controller.bits, *feed(controller, script(6, seed=1))] == [8, 8, 8, 4, 4, 2, 2]
    assert feed(make_controller("fixed", bits=3), script(2, seed=1)) == [3, 3]
    assert repr(make_controller("MQGrad", seed=1)) == repr(MQGrad(seed=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[(lambda bits=bits: FixedBits(bits), f"bits={bits!r} must be a whole number of bits from 2 to 8")
          for bits in (0, 1, 9, 4.0, True)],
        *[(lambda schedule=schedule: BitSchedule(schedule), "must map numbers of steps to bits and begin at 0")
          for schedule in ({}, {1: 4}, {0: 4, -1: 4}, {0: 4, 2.5: 4})],
        (lambda: BitSchedule({0: 4, 9: 9}), "schedule[9]=9 must be a whole number of bits from 2 to 8"),
        (lambda: MQGrad(0), "min_bits=0 must be"),
        (lambda: MQGrad(2, 9), "max_bits=9 must be"),
        (lambda: MQGrad(6, 5), "min_bits=6 must not be above max_bits=5"),
        (lambda: MQGrad(interval=1), "interval=1 must be at least 2"),
        (lambda: MQGrad(interval=0), "interval=0 must be a whole number"),
        (lambda: MQGrad(hidden=0), "hidden=0 must be a whole number"),
        (lambda: MQGrad(smoothing=1), "smoothing=1 must be at least 0 and below 1"),
        (lambda: MQGrad(gamma=math.nan), "gamma=nan must be at least 0 and below 1"),
        (lambda: MQGrad(exploration=1.1), "exploration=1.1 must be a share"),
        (lambda: MQGrad(learning_rate=0), "learning_rate=0 must be positive"),
        (lambda: MQGrad(reward="guess"), "reward='guess' must be 'modelled' or 'measured'"),
        (lambda: make_controller("mqgrd"), "bits='mqgrd' is not known: choose mqgrad"),
        (lambda: make_controller("fixed", steps=3), "bits='fixed' does not take these settings"),
        (lambda: FixedBits().load_state_dict(MQGrad().state_dict()), "the state is that of MQGrad"),
        (lambda: MQGrad(3, 5).load_state_dict(MQGrad(2, 4).state_dict()), "(2, 4, 5, 30) and this controller has"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(make, message):
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
