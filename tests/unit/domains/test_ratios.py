"""Ratios of domains: golden values, what every mix must satisfy, and the optimisation problem solved in another way."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from robustdist.domains import (
    DomainMixer,
    excess_losses,
    floored,
    multiplicative_ratios,
    next_potential,
    worst_mix,
)
from robustdist.domains.mixer import _Point
from robustdist.errors import UsageError


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near(found, wanted, tolerance: float = 1e-6) -> bool:
    return np.allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=tolerance)


def ball(q: torch.Tensor, p: torch.Tensor) -> float:
    return float(0.5 * (p * (q / p - 1) ** 2).sum())


def random_case(seed: int, domains: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(domains, generator=generator, dtype=torch.float64) + 0.05
    return torch.randn(domains, generator=generator, dtype=torch.float64) + 0.5, p / p.sum()


@pytest.mark.parametrize(
    ("losses", "reference", "p", "rho", "eta", "before", "after"),
    [
        (
            (2, 1, 3), (1.5, 0.9, 2), (0.5, 0.3, 0.2), 0.1, -0.218572,
            (0.514315, 0.136810, 0.348875), (0.483747, 0.188113, 0.328140),
        ),
        (
            (2.1, 1.2, 2.4, 0.8), (1.9, 1.15, 2.35, 0.75), (0.4, 0.3, 0.2, 0.1), 0.05, None,
            (0.554920, 0.222540, 0.148360, 0.074180), (0.540953, 0.216939, 0.144626, 0.097483),
        ),
    ],
)  # fmt: skip
def test_golden_values(losses, reference, p, rho, eta, before, after):
    mix = worst_mix(vector(*losses) - vector(*reference), vector(*p), rho=rho)
    assert near(mix.ratios, before)
    assert eta is None or abs(mix.eta - eta) < 5e-6  # of a search that ended at a width of 1e-4
    mixer = DomainMixer(p, "static_dro", rho=rho, reference=reference)
    assert mixer.update(losses, [1] * len(p))
    assert near(mixer.ratios, after)


def test_the_golden_value_of_multiplicative_weights():
    wanted = (0.485026, 0.195094, 0.319880)
    assert near(multiplicative_ratios(vector(0.5, 0.3, 0.2), vector(0.5, 0.1, 1.0)), wanted)
    mixer = DomainMixer((0.5, 0.3, 0.2), "sheared", reference=(1.5, 0.9, 2))
    mixer.update((2, 1, 3), [1, 1, 1])
    assert near(mixer.ratios, wanted)


@pytest.mark.parametrize("losses", [(1.0, 2.0, 3.0), (0.0, 0.0, 0.0)])
def test_losses_at_their_reference_change_nothing(losses):
    mixer = DomainMixer((0.5, 0.3, 0.2), "static_dro", reference=losses)
    mixer.update(losses, [1, 1, 1])
    assert near(mixer.ratios, (0.5, 0.3, 0.2), 1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("domains", [2, 5, 200])
@pytest.mark.parametrize("rho", [0.01, 0.1, 1.0])
def test_every_mix_is_one_in_the_ball_and_above_the_floors(seed, domains, rho):
    e, p = random_case(seed, domains)
    mix = worst_mix(e, p, rho=rho, min_ratio=0.2)
    q = mix.ratios
    assert abs(float(q.sum()) - 1) < 1e-12
    assert ball(q, p) <= rho * (1 + 1e-9)
    assert bool((q >= 0.2 * p / (0.2 + 1 / p.min())).all())
    assert bool((q * e).sum() >= (p * e).sum() - 1e-12), "the mix is worse than the potential one, never better"
    # either the ball is reached, or the domain with the largest excess has what the floors leave
    assert ball(q, p) > rho * (1 - 1e-6) or near(q, p, 1e-12)
    f = floored(q, float(p.min()))
    assert abs(float(f.sum()) - 1) < 1e-12
    assert float(f.min()) >= float(p.min()) / (1 + domains * float(p.min())) - 1e-12
    assert ball(f, p) <= rho * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_without_a_floor_it_is_the_worst_mix_of_the_ball(seed):
    e, p = random_case(seed, 4)
    found = worst_mix(e, p, rho=0.1, min_ratio=0.0).ratios
    e_, p_ = e.numpy(), p.numpy()
    solution = minimize(
        lambda q: -q @ e_,
        p_,
        jac=lambda q: -e_,
        method="SLSQP",
        bounds=[(0, 1)] * 4,
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1},
            {"type": "ineq", "fun": lambda q: 0.1 - 0.5 * (p_ * (q / p_ - 1) ** 2).sum()},
        ],
        options={"ftol": 1e-11, "maxiter": 500},
    )
    assert solution.success, solution.message
    assert near(found, solution.x, 1e-4)
    assert float(found @ e) == pytest.approx(-solution.fun, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_with_a_floor_it_is_the_tight_one_of_all_thresholds(seed):
    e, p = (value.numpy() for value in random_case(seed, 6))
    eta = np.linspace(e.max() - 30, e.max() - 1e-6, 100_000)[:, None]
    r = p * np.maximum(e - eta, 0)
    c = np.maximum(r / r.sum(1, keepdims=True) / p, 0.2)
    q = c * p / (c * p).sum(1, keepdims=True)
    inside = 0.5 * (p * (q / p - 1) ** 2).sum(1) <= 0.1
    best = q[inside][-1]
    assert not inside[-1]
    found = worst_mix(torch.tensor(e), torch.tensor(p), rho=0.1, min_ratio=0.2).ratios
    assert near(found, best, 1e-3)


def test_a_ball_that_cannot_be_reached_leaves_the_mix():
    p = vector(0.9, 0.1)
    mix = worst_mix(vector(1.0, 0.0), p, rho=0.1)
    assert near(mix.ratios, p)
    assert mix.eta == 1.0
    assert not near(worst_mix(vector(0.0, 1.0), p, rho=0.1).ratios, p, 0.1)


def test_references_above_all_losses_are_scaled_until_one_is_reached():
    assert near(excess_losses(vector(1.0, 2.0), vector(0.5, 3.0)), (0.5, -1.0))
    assert near(excess_losses(vector(1.0, 2.0), vector(2.0, 2.4)), (-0.6, 0.08), 1e-12)  # at 0.8
    assert near(excess_losses(vector(0.0, 0.0), vector(5.0, 9.0)), (0.0, 0.0))


def test_the_potential_mix_stays_between_half_and_twice_the_first():
    generator = torch.Generator().manual_seed(0)
    initial = vector(0.67, 0.045, 0.045, 0.02, 0.045, 0.025, 0.15)
    p = initial.clone()
    for step in range(300):
        q = torch.zeros(7, dtype=torch.float64) + 1e-3
        q[3 if step < 150 else int(torch.randint(7, (), generator=generator))] = 1
        p = next_potential(p, q / q.sum(), initial)
        assert abs(float(p.sum()) - 1) < 1e-12
        assert bool((p >= initial / 2 - 1e-12).all())
        assert bool((p <= 2 * initial + 1e-12).all())
        assert float(p.min()) >= 0.02 - 1e-12
        assert float(p.max()) <= 0.67 + 1e-12
        if step == 149:
            assert abs(float(p[3]) - 0.04) < 1e-9, "a domain that is always worst goes to its upper bound"


def test_the_potential_mix_moves_by_a_tenth():
    moved = next_potential(vector(0.4, 0.35, 0.25), vector(0.3, 0.45, 0.25), vector(0.5, 0.3, 0.2))
    assert near(moved, (0.39, 0.36, 0.25), 1e-12)


# --- the mixer as training goes on


def mixers(**options) -> DomainMixer:
    return DomainMixer((0.5, 0.3, 0.2), "dro", **options)


def test_without_a_reference_the_ratios_wait_for_a_tenth_of_training():
    mixer = mixers()
    mixer.update((1.0, 2.0, 3.0), [5, 5, 5], 0.09)
    assert near(mixer.ratios, (0.5, 0.3, 0.2))
    mixer.update((1.0, 2.0, 3.0), [5, 5, 5], 0.11)
    assert float(mixer.ratios[2]) > 0.25
    given = mixers(reference=(1.0, 1.0, 1.0))
    given.update((1.0, 2.0, 3.0), [5, 5, 5], 0.01)
    assert float(given.ratios[2]) > 0.25


def curve(step: int) -> list[float]:
    return [0.5 + 3 * (10 * step) ** -0.5, 1.0 + 2 * (10 * step) ** -0.3, 0.2 + 4 * (10 * step) ** -0.7]


@pytest.mark.slow
def test_references_are_predicted_and_only_fall():
    mixer = mixers(reference=(9.0, 0.01, 9.0))
    before = None
    for step in range(2, 16):
        mixer.update(curve(step), [10 * step] * 3, step / 100)
        if step < 12:
            assert near(mixer.reference, (9.0, 0.01, 9.0)), "eleven points are needed"
        else:
            assert before is None or bool((mixer.reference <= before).all())
            before = mixer.reference.clone()
    assert near(mixer.reference, curve(100), 0.05)
    assert mixers(dynamic_reference=False).update(curve(3), [1] * 3, 0.5)


def test_the_potential_mix_moves_from_a_fifth_of_training_on():
    mixer = mixers(dynamic_reference=False)
    mixer.update((1.0, 2.0, 3.0), [5, 5, 5], 0.19)
    assert near(mixer.potential, (0.5, 0.3, 0.2))
    mixer.update((1.0, 2.0, 3.0), [5, 5, 5], 0.21)
    assert float(mixer.potential[2]) > 0.2
    fixed = mixers(dynamic_ratio=False)
    fixed.update((1.0, 2.0, 3.0), [5, 5, 5], 0.9)
    assert near(fixed.potential, (0.5, 0.3, 0.2))


def test_losses_that_are_not_finite_change_nothing():
    mixer = mixers(reference=(1.0, 1.0, 1.0))
    mixer.update((1.0, 2.0, 3.0), [5, 5, 5], 0.5)
    before = mixer.state_dict()
    for loss in (float("nan"), float("inf"), -float("inf")):
        assert not mixer.update((1.0, loss, 3.0), [9, 9, 9], 0.6)
        assert mixer.state_dict() == before


@pytest.mark.slow
def test_a_domain_without_a_sample_so_far_does_not_spoil_the_prediction():
    mixer = mixers()
    for step in range(2, 16):
        late = 10 * max(0, step - 4)
        assert mixer.update(curve(step), [10 * step, late, 0], step / 100)
    assert bool(mixer.ratios.isfinite().all())
    assert float(mixer.reference[0]) > 0
    assert float(mixer.reference[1]) > 0, "the points before its first sample are left out"
    assert float(mixer.reference[2]) == 0


def test_a_resumed_mixer_goes_on_as_if_nothing_had_happened():
    whole, half = mixers(seed=3), mixers(seed=3)
    for step in range(1, 101):
        for mixer in (whole, half) if step < 90 else (whole,):
            mixer.update(curve(step), [10 * step] * 3, 0.02 + step / 1300)
    resumed = mixers(seed=3)
    resumed.load_state_dict(torch.load(_saved(half.state_dict()), weights_only=True))
    for step in range(90, 101):
        resumed.update(curve(step), [10 * step] * 3, 0.02 + step / 1300)
    for mixer in (whole, resumed):
        mixer.update(curve(101), [1010] * 3, 0.5)
    assert resumed.state_dict() == whole.state_dict()
    assert len(whole.state_dict()["points"]) == 64


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_of_a_full_list_an_old_point_makes_room():
    mixer = mixers(seed=1)
    for step in range(300):
        mixer._keep(_Point([step] * 3, [1.0] * 3))
        steps = [point.samples[0] for point in mixer._points]
        assert steps == sorted(steps)
        assert steps[-33:] == list(range(max(0, step - 32), step + 1)), "the younger half is never dropped"
    assert len(steps) == 64
    assert steps[0] < 200, "nor always the oldest"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 0}, "rho=0 must be"),
        ({"rho": -1}, "rho=-1 must be"),
        ({"rho": float("nan")}, "rho=nan"),
        ({"min_ratio": 1.0}, "min_ratio=1.0"),
        ({"step_size": -1}, "step_size=-1"),
        ({"reference": [1.0]}, "reference has 1 losses for 3 domains"),
        ({"reference": [1.0, 2.0, float("nan")]}, "finite"),
        ({"method": "best"}, "method='best' must be one of dro"),
        ({"initial": [0.5, 0.5, 0.0]}, "positive"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DomainMixer(**{"initial": (0.5, 0.3, 0.2), **options})


def test_wrong_numbers_of_domains_are_refused():
    mixer = mixers()
    with pytest.raises(UsageError, match="2 losses were given for 3 domains"):
        mixer.update((1.0, 2.0), [1, 1])
    with pytest.raises(UsageError, match="2 domains"):
        mixer.load_state_dict(DomainMixer((0.5, 0.5)).state_dict())
