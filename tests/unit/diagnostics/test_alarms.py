"""The checks fire on evaluations that fool themselves, each with the right flag, and on no honest one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from robustdist.attacks import PGD
from robustdist.diagnostics import diagnose
from robustdist.evaluation.findings import CHECKS

from .conftest import EPS, DigitsNet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Then(nn.Module):
    """A net and a function of its logits."""

    def __init__(self, net: nn.Module, function) -> None:
        super().__init__()
        self.net, self.function = net, function

    def forward(self, x):
        return self.function(self.net(x))


class Quantised(DigitsNet):
    """Rounds its activations, so gradients end there."""

    def activation(self, x):
        return torch.round(torch.relu(x) * 8) / 8


class Noisy(nn.Module):
    """Adds noise at inference."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x + 0.1 * torch.randn_like(x))


def quantised(net: DigitsNet) -> nn.Module:
    other = Quantised()
    other.load_state_dict(net.state_dict())
    return other.eval().requires_grad_(False)


def three_classes(logits):
    return torch.stack([logits[:, :4].amax(1), logits[:, 4:7].amax(1), logits[:, 7:].amax(1)], 1)


def judged(net, x, y, eps=EPS, attacks=None):
    return diagnose(net, x, y, attacks or {"pgd20": PGD(eps=eps, steps=20, restarts=2)})


@pytest.mark.parametrize("eps", [EPS, EPS / 3])
@pytest.mark.parametrize("kind", ["ordinary", "robust"])
def test_honest_nets_raise_no_alarm(kind, eps, digits, request):
    result = judged(request.getfixturevalue(kind), *digits[2:], eps)
    assert list(result.checks) == list(CHECKS)
    assert {name: check for name, check in result.checks.items() if not check.passed} == {}
    assert result.clean_acc > 0.9
    assert (result.robust_acc < 0.2) == (kind == "ordinary" and eps == EPS)


def test_probabilities_in_the_place_of_logits(digits, robust):
    result = judged(Then(robust, lambda logits: logits.softmax(1)), *digits[2:])
    assert "logits" in result.failed_checks
    assert result.checks["logits"].detail == "the model returns probabilities"


@pytest.mark.parametrize("kind", ["ordinary", "robust"])
def test_huge_logits(kind, digits, request):
    net = request.getfixturevalue(kind)
    result = judged(Then(net, lambda logits: 1e4 * logits), *digits[2:])
    assert {"gradient", "larger_radius", "black_box"} <= set(result.failed_checks)
    assert "cross-entropy is blind" in result.checks["gradient"].detail
    assert result.robust_acc > judged(net, *digits[2:]).robust_acc + 0.2, "the example shows nothing"


def test_huge_logits_are_found_by_who_attacks_the_margin_too(digits, robust):
    attacks = {"margin": PGD(eps=EPS, steps=20, restarts=2, attack_loss="margin")}
    result = judged(Then(robust, lambda logits: 1e4 * logits), *digits[2:], attacks=attacks)
    assert result.failed_checks == ["gradient"]


@pytest.mark.parametrize("loss", ["ce", "margin"])
def test_quantised_activations(loss, digits, robust):
    attacks = {"pgd": PGD(eps=EPS, steps=20, attack_loss=loss)}
    result = judged(quantised(robust), *digits[2:], attacks=attacks)
    assert {"gradient", "larger_radius", "black_box", "transfer"} <= set(result.failed_checks)
    assert "rounding" in result.checks["gradient"].detail


def test_noise_at_inference(digits, ordinary):
    result = judged(Noisy(ordinary), *digits[2:])
    assert "deterministic" in result.failed_checks
    assert "rand" in result.checks["deterministic"].detail


def test_three_classes(digits, robust):
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    x, y = digits[2], labels[digits[3]]
    result = judged(Then(robust, three_classes), x, y, EPS / 3)
    assert result.failed_checks == []
    assert result.unchecked == ["classes"]
    assert "the fallback is cross-entropy and the margin loss with 2 targets" in result.checks["classes"].detail


def test_an_attack_that_is_too_weak(digits, ordinary):
    result = judged(ordinary, *digits[2:], attacks={"weak": PGD(eps=EPS, steps=1, step_size=EPS / 20)})
    assert {"more_steps", "black_box"} <= set(result.failed_checks)


def test_a_substitute_of_the_user(digits, robust, ordinary):
    x, y = digits[2:]
    net = quantised(robust)
    # the same net without the rounding is the best substitute there is
    twin = copy.deepcopy(robust)
    result = diagnose(net, x, y, {"pgd": PGD(eps=EPS, steps=5)}, surrogate=twin, check_samples=50)
    assert not result.checks["transfer"].passed
    own = diagnose(net, x, y, {"pgd": PGD(eps=EPS, steps=5)}, check_samples=50)

    def left(found):
        return float(found.checks["transfer"].detail.split("leaves ")[1].split(" %")[0])

    assert left(result) < left(own)
