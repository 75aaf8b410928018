"""OneBitAdam on one process: its two kinds of steps, its masks, what it refuses."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robustdist.errors import RobustDistWarning, UsageError
from robustdist.optim import OneBitAdam

SHAPES = ((4, 3), (5,), ())
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}


def gradients(steps: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def weights(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(grad) for grad in gradients(1, shapes)[0]]


def advance(optimizer: torch.optim.Optimizer, steps: list[list[Tensor | None]]) -> None:
    for step in steps:
        for weight, grad in zip(optimizer.param_groups[0]["params"], step, strict=True):
            weight.grad = None if grad is None else grad.clone()
        optimizer.step()


def stored(optimizer: OneBitAdam, weight: Tensor) -> Tensor:
    return optimizer.state[weight]["exp_avg_sq"]


# --- the formula


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_the_first_steps_are_those_of_adam_to_the_bit(weight_decay):
    steps: list[list[Tensor | None]] = [list(step) for step in gradients(12)]
    steps[0][1] = steps[5][0] = None  # one starts late, one pauses
    ours = OneBitAdam(weights(), **SETTINGS, weight_decay=weight_decay, freeze_step=12)
    adam = torch.optim.Adam(weights(), **SETTINGS, weight_decay=weight_decay)
    advance(ours, steps)
    advance(adam, steps)
    for mine, reference in zip(ours.param_groups[0]["params"], adam.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize(
    ("options", "synced"),
    [
        ({"freeze_step": 4}, {0, 1, 2, 3}),
        ({"freeze_step": 10, "variance": "zero_one", "kappa": 2}, {0, 1, 2, 4, 6}),
        ({"freeze_step": 20, "variance": "zero_one", "kappa": 2}, {0, 1, 2, 4, 6, 10, 14}),
        ({"freeze_step": 20, "variance": "zero_one", "kappa": 3}, {0, 1, 2, 3, 5, 7, 9, 13, 17}),
        ({"freeze_step": 99, "variance": "zero_one"}, {*range(16), *range(16, 48, 2), *range(48, 99, 4)}),
    ],
    ids=str,
)
def test_steps_equal_the_derivation(options, synced):
    """In numpy and double precision; what is averaged by ``reduce`` is known by its trace: it gains a tenth."""

    def reduce(tensors):
        assert tensors.pop("faults").tolist() == [0.0, 0.0]
        for momentum in tensors.values():
            momentum.mul_(1.1)

    steps = gradients(100)
    optimizer = OneBitAdam(weights(), **SETTINGS, weight_decay=0.1, reduce=reduce, **options)
    assert {step for step in range(100) if optimizer.wants_gradient_sync(step)} == synced
    advance(optimizer, steps)
    assert optimizer.num_steps == 100
    for place, found in enumerate(optimizer.param_groups[0]["params"]):
        theta = weights()[place].detach().double().numpy()
        m, v, updates = np.zeros_like(theta), np.zeros_like(theta), 0
        for t, step in enumerate(steps):
            g = step[place].double().numpy() + 0.1 * theta
            m = 0.8 * m + 0.2 * g
            if t in synced:
                v, updates = 0.95 * v + 0.05 * g**2, updates + 1
            else:
                m = 1.1 * m
            theta = theta - 0.02 * m / (1 - 0.8 ** (t + 1)) / (np.sqrt(v / (1 - 0.95**updates)) + 1e-6)
        np.testing.assert_allclose(found.detach().numpy(), theta, rtol=1e-4, atol=1e-5)


def test_a_missing_gradient_counts_as_zero_once_momenta_are_averaged():
    with_zeros, without = (OneBitAdam(weights(), **SETTINGS, weight_decay=0.1, freeze_step=3) for _ in range(2))
    steps = gradients(8)
    advance(with_zeros, [*steps[:5], *[[torch.zeros(shape) for shape in SHAPES]] * 3])
    advance(without, [*steps[:5], *[[None] * 3] * 3])
    for one, other in zip(with_zeros.param_groups[0]["params"], without.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


# --- entries that have no variance


def noisy(tensors) -> None:
    """What a codec without a zero makes of them."""
    for name, momentum in tensors.items():
        if name != "faults":
            momentum.add_(torch.where(torch.rand(momentum.shape) < 0.5, -0.1, 0.1))


def embedding_steps(optimizer: OneBitAdam, weight: Tensor, rows: list[int], steps: int) -> None:
    for step in range(steps):
        weight.grad = torch.zeros_like(weight)
        weight.grad[rows] = torch.randn(len(rows), weight.shape[1], generator=torch.Generator().manual_seed(step))
        optimizer.step()


@pytest.mark.parametrize("variance", ["onebit", "zero_one"])
def test_rows_that_are_never_used_stay_as_they_are(variance):
    weight = nn.Parameter(torch.randn(10, 7))
    before = weight.detach().clone()
    optimizer = OneBitAdam([weight], lr=0.01, freeze_step=20, variance=variance, kappa=2, reduce=noisy)
    embedding_steps(optimizer, weight, [2, 7], 100)
    unused = [row for row in range(10) if row not in (2, 7)]
    assert torch.equal(weight[unused], before[unused])
    assert bool((weight[[2, 7]] != before[[2, 7]]).all())


def test_late_rows_are_told_once_and_stay():
    weight = nn.Parameter(torch.randn(10, 7))
    before = weight.detach().clone()

    def reduce(tensors) -> None:
        assert not tensors["table"][3:5].any(), "what is not used is not sent either"
        noisy(tensors)

    optimizer = OneBitAdam([("table", weight)], lr=0.01, freeze_step=5, reduce=reduce)
    embedding_steps(optimizer, weight, [2], 5)
    with pytest.warns(RobustDistWarning, match="14 of 70 entries of table have their first gradient after step 5"):
        embedding_steps(optimizer, weight, [2, 3, 4], 1)
    embedding_steps(optimizer, weight, [2, 3, 4], 5)
    assert torch.equal(weight[3:5], before[3:5])
    assert optimizer.state[weight]["exp_avg"][3:5].abs().max() == 0


def test_rows_may_come_later_while_the_variance_is_still_updated():
    weight = nn.Parameter(torch.randn(10, 7))
    before = weight.detach().clone()
    optimizer = OneBitAdam([weight], lr=0.01, freeze_step=50, variance="zero_one", kappa=1, reduce=noisy)
    embedding_steps(optimizer, weight, [2], 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedding_steps(optimizer, weight, [2, 3], 60)
    assert bool((weight[3] != before[3]).all())


@pytest.mark.parametrize("seen", ["never", "with zeros"])
def test_a_parameter_whose_variance_is_zero_for_good_stops_the_training(seen):
    first, second = weights()[:2]
    optimizer = OneBitAdam([("first", first), ("second", second)], freeze_step=3)
    steps = [[first, None if seen == "never" else torch.zeros_like(second)] for first, second, _ in gradients(4)]
    advance(optimizer, steps)  # one step beyond the freeze is no fault yet
    with pytest.raises(UsageError, match=r"second had no gradient until step 3, .* raise freeze_step"):
        advance(optimizer, [step[:2] for step in gradients(1)])


# --- steps that are skipped


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skipped_steps_leave_no_trace(bad):
    """Sums of large finite values overflow, which is no reason to skip."""
    steps = gradients(12)
    steps[9][0].fill_(3e38)
    skipping, clean = (OneBitAdam(weights(), **SETTINGS, freeze_step=4) for _ in range(2))
    advance(clean, steps)
    for place, step in enumerate(steps):
        if place in (2, 3, 5, 7):
            spoilt = [grad.clone() for grad in step]
            spoilt[1][3] = bad
            advance(skipping, [spoilt])
        advance(skipping, [step])
    for one, other in zip(clean.param_groups[0]["params"], skipping.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(stored(clean, one), stored(skipping, other))
    assert skipping.num_steps == 12


@pytest.mark.parametrize("freeze_step", [1, 100])
def test_training_that_skips_every_step_ends(freeze_step):
    first, second = weights()[:2]
    optimizer = OneBitAdam([("first", first), ("second", second)], freeze_step=freeze_step, max_skipped=3)
    good = [step[:2] for step in gradients(8)]
    bad = [[first, torch.full_like(second, math.inf)] for first, second in good]
    advance(optimizer, [*good[:3], *bad[:2], good[3], *bad[:2]])
    with pytest.raises(
        UsageError, match=r"skipped 3 steps in a row after step 4.*the gradient of second is not finite"
    ):
        advance(optimizer, bad[:1])


# --- as an optimiser


@pytest.mark.parametrize("variance", ["onebit", "zero_one"])
def test_training_goes_on_bit_by_bit_from_a_saved_state(variance):
    steps = gradients(40)
    make = lambda: OneBitAdam(weights(), **SETTINGS, freeze_step=25, variance=variance, kappa=3)  # noqa: E731
    whole = make()
    advance(whole, steps)
    for place in (2, 11, 30):
        first, second = make(), make()
        advance(first, steps[:place])
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        for weight, saved in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            weight.data.copy_(saved.data)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.num_steps == place
        advance(second, steps[place:])
        for one, other in zip(whole.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
            assert torch.equal(one, other)


def test_groups_have_their_own_settings_and_one_count_of_steps():
    first, second = weights()[:2]
    optimizer = OneBitAdam([{"params": [first], "lr": 0.0}], lr=0.1, freeze_step=2)
    before, last = first.detach().clone(), second.detach().clone()
    first.grad = torch.ones_like(first)
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert [group["num_steps"] for group in optimizer.param_groups] == [2, 2]
    assert not optimizer.wants_gradient_sync()
    assert torch.equal(first, before)
    torch.testing.assert_close(second.detach(), last - 0.1)


def test_a_closure_runs_once_with_gradients():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = OneBitAdam([weight], lr=0.1, freeze_step=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 25.0
    torch.testing.assert_close(weight.detach(), torch.tensor([2.9, 3.9]))


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(UsageError, match=r"sparse gradient of weight: .*sparse=False"):
        OneBitAdam(embedding.named_parameters(), freeze_step=3).step()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"betas": (0.9,)}, "betas="),
        ({"freeze_step": 0}, "freeze_step=0"),
        ({"freeze_step": 1.5}, "freeze_step=1.5"),
        ({"kappa": 0}, "kappa=0"),
        ({"max_skipped": 0}, "max_skipped=0"),
        ({"variance": "frozen"}, "variance='frozen' must be 'onebit' "),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_named(settings, named):
    with pytest.raises(UsageError, match=named):
        OneBitAdam([nn.Parameter(torch.ones(1))], **{"freeze_step": 3, **settings})
