"""Losses and gradients of each objective against a derivation by hand on a two-layer network, without autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, Attack
from robustdist.errors import UsageError
from robustdist.objectives import DAT, PGDAT, ObjectiveContext

NUM_IN, NUM_HIDDEN, NUM_CLASSES = 6, 7, 4
EPS, STEP_SIZE, STEPS = 0.1, 0.04, 4
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


class Weights(NamedTuple):
    """Of logits = relu(x W1' + b1) W2' + b2."""

    w1: np.ndarray
    b1: np.ndarray
    w2: np.ndarray
    b2: np.ndarray


def network(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(NUM_IN, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_CLASSES)).to(
        dtype
    )


def weights_of(net: nn.Sequential) -> Weights:
    return Weights(*(parameter.detach().double().numpy() for parameter in net.parameters()))


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.rand(5, 1, 2, 3, dtype=dtype)
    x[0, 0, 0], x[1, 0, 1] = 0.0, 1.0  # the box is felt
    return x, torch.tensor([0, 3, 1, 1, 2])


def backward(weights: Weights, x: np.ndarray, y: np.ndarray) -> tuple[float, Weights, np.ndarray]:
    """Return the mean cross-entropy, its gradient in the weights, and that of the summed one in the input."""
    hidden = x @ weights.w1.T + weights.b1
    active = np.maximum(hidden, 0)
    logits = active @ weights.w2.T + weights.b2
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = float(-np.log(probabilities[rows, y]).mean())
    error = probabilities.copy()
    error[rows, y] -= 1
    error_hidden = (error @ weights.w2) * (hidden > 0)
    share = 1 / len(y)
    gradient = Weights(
        share * error_hidden.T @ x, share * error_hidden.sum(0), share * error.T @ active, share * error.sum(0)
    )
    return loss, gradient, error_hidden @ weights.w1


def attacked(weights: Weights, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Signed steps from x; eps ball and unit box after each."""
    x_adv = x.copy()
    for _ in range(STEPS):
        x_adv = x_adv + STEP_SIZE * np.sign(backward(weights, x_adv, y)[2])
        x_adv = np.clip(np.clip(x_adv, x - EPS, x + EPS), 0, 1)
    return x_adv


def expected(weights: Weights, x: Tensor, y: Tensor, clean_weight: float) -> tuple[float, list[np.ndarray]]:
    """Return the robust loss plus ``clean_weight`` times the clean one, and the gradient in the weights."""
    flat, labels = x.double().flatten(1).numpy(), y.numpy()
    robust, robust_gradient, _ = backward(weights, attacked(weights, flat, labels), labels)
    clean, clean_gradient, _ = backward(weights, flat, labels)
    total = [r + clean_weight * c for r, c in zip(robust_gradient, clean_gradient, strict=True)]
    return robust + clean_weight * clean, total


def attack() -> Attack:
    return PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, random_start=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize(
    ("objective", "clean_weight"),
    [(PGDAT(), 0.0), (DAT(0.0), 0.0), (DAT(), 1.0), (DAT(0.3), 0.3), (DAT(7.0), 7.0)],
    ids=lambda value: repr(value),
)
def test_loss_and_gradient_equal_the_derivation(objective, clean_weight, dtype):
    net = network(dtype)
    x, y = batch(dtype)
    loss = objective(net, x, y, attack=attack())
    loss.backward()
    value, gradient = expected(weights_of(net), x, y, clean_weight)
    assert loss.item() == pytest.approx(value, rel=0, abs=TOLERANCES[dtype] * (1 + clean_weight))
    for parameter, reference in zip(net.parameters(), gradient, strict=True):
        np.testing.assert_allclose(
            parameter.grad.double().numpy(), reference, rtol=0, atol=TOLERANCES[dtype] * (1 + clean_weight)
        )


def test_the_derivation_itself_agrees_with_finite_differences():
    net = network(torch.float64)
    x, y = batch(torch.float64)
    weights, flat, labels = weights_of(net), x.flatten(1).numpy(), y.numpy()
    _, gradient, input_gradient = backward(weights, flat, labels)
    for place, entry in ((0, (2, 3)), (1, (1,)), (2, (3, 4)), (3, (0,))):
        shifted = []
        for sign in (1, -1):
            moved = [weight.copy() for weight in weights]
            moved[place][entry] += sign * 1e-6
            shifted.append(backward(Weights(*moved), flat, labels)[0])
        assert (shifted[0] - shifted[1]) / 2e-6 == pytest.approx(gradient[place][entry], abs=1e-8)
    moved_input = [flat.copy(), flat.copy()]
    moved_input[0][2, 1] += 1e-6
    moved_input[1][2, 1] -= 1e-6
    losses = [len(y) * backward(weights, value, labels)[0] for value in moved_input]
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(input_gradient[2, 1], abs=1e-8)


def test_the_attack_of_the_derivation_reaches_ball_and_box():
    net = network(torch.float64)
    x, y = batch(torch.float64)
    flat = x.flatten(1).numpy()
    delta = attacked(weights_of(net), flat, y.numpy()) - flat
    assert np.isclose(np.abs(delta), EPS).any()
    assert (np.abs(delta) < EPS - 1e-9).any()


@pytest.mark.parametrize("make_attack", [lambda: PGD(eps=0.1, steps=3), lambda: FGSM(eps=0.1, random_start=True)])
@pytest.mark.parametrize("step", [0, 5])
def test_dat_without_clean_weight_is_pgdat_bit_for_bit(make_attack, step):
    net = network(torch.float32)
    x, y = batch(torch.float32)
    results = []
    for objective in (DAT(clean_weight=0.0), PGDAT()):
        net.zero_grad()
        loss = objective(net, x, y, attack=make_attack(), rank=3, step=step)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_logged_losses_are_the_two_terms():
    terms = iter([torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)])
    unused = dict.fromkeys(
        ("logits", "loss_and_logits", "reference", "problem", "from_pixels", "take", "module"), NotImplemented
    )
    context = ObjectiveContext(x=torch.ones(1), y=None, attack=lambda x, y: x, loss=lambda x: next(terms), **unused)
    loss = DAT(0.5).compute(context)
    assert loss.item() == 5.5
    assert {name: value.item() for name, value in context.logs.items()} == {"adv_loss": 3.0, "clean_loss": 5.0}


def test_a_mean_over_workers_is_the_objective_of_the_whole_batch():
    # what the workers of distributed adversarial training average: equal shares, no batch norm, no random start
    net = network(torch.float64)
    x, y = torch.rand(6, 1, 2, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])

    def gradient(rows: slice) -> Tensor:
        net.zero_grad()
        DAT()(net, x[rows], y[rows], attack=attack()).backward()
        return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])

    mean = (gradient(slice(0, 3)) + gradient(slice(3, 6))) / 2
    torch.testing.assert_close(mean, gradient(slice(0, 6)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("clean_weight", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
def test_a_clean_weight_that_is_no_weight_is_refused(clean_weight):
    with pytest.raises(UsageError, match="clean_weight"):
        DAT(clean_weight=clean_weight)
