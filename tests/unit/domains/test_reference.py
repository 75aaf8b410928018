"""The scaling law finds the parameters that made the points, and predicts the end."""

from __future__ import annotations

import math

import pytest
import torch

from robustdist.domains import fit_scaling_laws, predicted_loss


def law(a: float, alpha: float, e: float, samples: float) -> float:
    return math.exp(a - alpha * math.log(samples)) + math.exp(e)


@pytest.mark.parametrize(("a", "alpha", "e"), [(2.0, 0.5, -0.5), (3.0, 0.4, 0.0), (1.0, 0.7, -3.0)])
def test_planted_parameters_are_found(a, alpha, e):
    samples = [50 * (step + 1) for step in range(30)]
    best, *_ = laws = fit_scaling_laws(samples, [law(a, alpha, e, count) for count in samples])
    assert best[:3] == pytest.approx((a, alpha, e), abs=1e-3)
    assert [each.error for each in laws] == sorted(each.error for each in laws)
    assert best(7500) == pytest.approx(law(a, alpha, e, 7500), abs=1e-4)


def test_noise_and_an_outlier_move_the_prediction_little():
    generator = torch.Generator().manual_seed(0)
    samples = [50 * (step + 1) for step in range(30)]
    noise = (0.01 * torch.randn(30, generator=generator)).tolist()
    losses = [law(2.0, 0.5, -0.5, count) + each for count, each in zip(samples, noise, strict=True)]
    losses[20] += 5
    assert predicted_loss(samples, losses, 7500) == pytest.approx(law(2.0, 0.5, -0.5, 7500), abs=0.05)


@pytest.mark.parametrize("losses", [[1.0] * 12, [1.0 + 0.1 * step for step in range(12)], [0.0] * 12])
def test_a_prediction_is_between_zero_and_the_smallest_loss(losses):
    samples = [10 * (step + 1) for step in range(12)]
    assert 0 <= predicted_loss(samples, losses, 1200) <= min(losses) + 1e-12


def test_the_fit_draws_no_random_numbers_and_works_without_gradients():
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert predicted_loss([10.0 * (n + 1) for n in range(11)], [1 / (n + 1) for n in range(11)], 500) < 0.1
    assert torch.equal(state, torch.get_rng_state())
