"""FriendlyPGD against the loop over single images, and against PGD."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.attacks import PGD, FriendlyPGD
from robustdist.core.testing import TinyNet, toy_images
from robustdist.errors import UsageError

EPS, STEP, STEPS = 0.2, 0.05, 6
SETTINGS = {"eps": EPS, "steps": STEPS, "step_size": STEP}


@pytest.fixture
def task():
    torch.manual_seed(0)
    net = TinyNet().double().eval()
    x, _ = toy_images(40)
    x = x.double()
    # right at first, so that some fall early, some late and some never
    return net, x, net(x).argmax(1)


def alone(net: nn.Module, x: torch.Tensor, y: torch.Tensor, tau: int) -> tuple[torch.Tensor, int]:
    """One image from its own place, step by step."""
    x_adv, left = x.clone(), None
    for step in range(STEPS):
        x_adv = x_adv.detach().requires_grad_()
        logits = net(x_adv)
        if left is None and int(logits.argmax(1)) != int(y):
            left = tau
        if left == 0:
            return x_adv.detach(), step
        if left is not None:
            left -= 1
        (grad,) = torch.autograd.grad(F.cross_entropy(logits, y), x_adv)
        moved = x_adv + STEP * grad.sign()
        x_adv = torch.minimum(torch.maximum(moved, x - EPS), x + EPS).clamp(0, 1)
    return x_adv.detach(), STEPS


@pytest.mark.parametrize("tau", [0, 1, 2, STEPS])
def test_every_image_stops_where_it_would_alone(task, tau):
    net, x, y = task
    attack = FriendlyPGD(tau=tau, random_start=False, **SETTINGS)
    x_adv = attack(net, x, y)
    expected, steps = zip(*(alone(net, x[i : i + 1], y[i : i + 1], tau) for i in range(len(x))), strict=True)
    assert torch.allclose(x_adv, torch.cat(expected), atol=1e-12, rtol=0)
    assert float(attack.mean_steps) == pytest.approx(sum(steps) / len(steps))
    if tau < STEPS:
        assert len(set(steps)) > 2


@pytest.mark.parametrize("noise_std", [0.0, 0.01])
def test_stopped_images_leave_the_batch_without_a_trace_in_the_others(task, noise_std):
    net, x, y = task
    sizes = []
    net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    attack = FriendlyPGD(tau=1, noise_std=noise_std, **SETTINGS)
    ids = list(range(len(x)))
    together = attack(net, x, y, sample_ids=ids)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    assert float(attack.mean_steps) * len(x) == pytest.approx(sum(sizes) - _stops(sizes), abs=len(x))
    few = [3, 17, 30]
    assert torch.allclose(together[few], attack(net, x[few], y[few], sample_ids=few), atol=1e-12, rtol=0)
    # a forward pass that reads the whole batch gets it, with the same result
    sizes.clear()
    whole = attack.run(net, x, y, sample_ids=ids, rowwise=False).x_adv
    assert set(sizes) == {len(x)}
    assert torch.allclose(whole, together, atol=1e-12, rtol=0)


def _stops(sizes: list[int]) -> int:
    return sizes[0] - sizes[-1]


def test_with_patience_for_all_steps_it_is_pgd_bit_for_bit(task):
    net, x, y = task
    assert torch.equal(FriendlyPGD(tau=STEPS, **SETTINGS)(net, x, y), PGD(**SETTINGS)(net, x, y))


def test_noise_is_added_in_every_step_and_stays_in_the_ball(task):
    net, x, y = task
    quiet, noisy = (FriendlyPGD(tau=STEPS, noise_std=std, **SETTINGS)(net, x, y) for std in (0.0, 0.01))
    assert not torch.equal(quiet, noisy)
    assert float((noisy - x).abs().max()) <= EPS + 1e-12


def test_like_keeps_the_settings_of_pgd(task):
    source = PGD(eps=0.1, steps=3, attack_loss="margin", bounds=(0.0, 2.0), restarts=2)
    made = FriendlyPGD.like(source, tau=2, noise_std="1/100")
    assert (made.eps, made.steps, made.attack_loss, made.bounds) == (0.1, 3, "margin", (0.0, 2.0))
    assert (made.tau, made.noise_std, made.restarts) == (2, 0.01, 1)
    with pytest.raises(UsageError, match="stops at wrong classes"):
        FriendlyPGD.like(PGD(attack_loss=lambda logits, y: logits.sum(1)), tau=0, noise_std=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": -1}, "tau=-1"),
        ({"tau": 1.5}, "tau=1.5"),
        ({"tau": True}, "tau=True"),
        ({"noise_std": -0.1}, "noise_std=-0.1"),
        ({"restarts": 2}, "restarts > 1"),
        ({"targeted": True}, "no targeted mode"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        FriendlyPGD(**options)
