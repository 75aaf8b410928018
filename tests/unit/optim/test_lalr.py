"""LALR against a derivation in numpy, and its corner cases."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.optim import LALR

DEFAULTS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-4, "clamp": (0.0, 10.0)}


def naive(theta: np.ndarray, grads: list[np.ndarray | None], lr, betas, eps, weight_decay, clamp) -> np.ndarray:
    """One tensor, entry by entry where the formula says entry, in double precision."""
    theta = theta.astype(np.float64).copy()
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for g in grads:
        if g is None:
            continue
        g = g.astype(np.float64)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (np.sqrt(v) + eps) + weight_decay * theta
        numerator = min(max(math.sqrt(float((theta**2).sum())), clamp[0]), clamp[1])
        denominator = math.sqrt(float((u**2).sum()))
        ratio = numerator / denominator if numerator > 0 and denominator > 0 else 1.0
        theta = theta - lr * ratio * u
    return theta


def length(x: Tensor) -> float:
    return math.sqrt(float(x.detach().double().square().sum()))


def take_step(value: Tensor, grad: Tensor, **kwargs) -> Tensor:
    weight = nn.Parameter(value.clone())
    weight.grad = grad.clone()
    LALR([weight], **kwargs).step()
    return weight.detach()


def run(values: list[Tensor], grads: list[list[Tensor | None]], **kwargs) -> list[Tensor]:
    weights = [nn.Parameter(value.clone()) for value in values]
    optimizer = LALR(weights, **kwargs)
    for step in grads:
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [weight.detach() for weight in weights]


# --- the formula


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=["f64", "f32"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 0.3, "lr": 0.1},
        {"betas": (0.0, 0.5), "eps": 1e-2},
        {"betas": (0.7, 0.0)},
        {"clamp": (0.5, 2.0)},
        {"clamp": (0.0, math.inf)},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_several_steps_equal_the_derivation(settings, dtype, tolerance):
    settings = {**DEFAULTS, **settings}
    shapes = [(4, 3), (5,), (2, 3, 2, 2), ()]
    scales = [1.0, 1e-3, 40.0, 1.0]  # the third is longer than the upper bound
    values = [scale * torch.randn(shape, dtype=dtype) for shape, scale in zip(shapes, scales, strict=True)]
    grads = [[torch.randn(shape, dtype=dtype) * 10.0**-step for shape in shapes] for step in range(6)]
    found = run(values, grads, **settings)
    for place, (value, weight) in enumerate(zip(values, found, strict=True)):
        expected = naive(value.numpy(), [step[place].numpy() for step in grads], **settings)
        np.testing.assert_allclose(weight.double().numpy(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(weight, value) == (settings["lr"] == 0)


def test_groups_keep_their_own_settings():
    first = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0, "clamp": (0.0, 1.0)}
    second = {"lr": 0.03, "weight_decay": 0.2}
    values = [torch.randn(3, 4, dtype=torch.float64), torch.randn(7, dtype=torch.float64) * 3]
    grads = [[torch.randn_like(value) for value in values] for _ in range(5)]
    weights = [nn.Parameter(value.clone()) for value in values]
    optimizer = LALR([{"params": [weights[0]], **first}], weight_decay=0.5)
    optimizer.add_param_group({"params": [weights[1]], **second})
    for step in grads:
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    for place, settings in enumerate(({**DEFAULTS, **first}, {**DEFAULTS, **second})):
        expected = naive(values[place].numpy(), [step[place].numpy() for step in grads], **settings)
        np.testing.assert_allclose(weights[place].detach().numpy(), expected, rtol=1e-13, atol=1e-13)


def test_defaults_are_those_of_the_paper():
    assert LALR([nn.Parameter(torch.ones(1))]).defaults == DEFAULTS


def test_a_tensor_does_not_feel_its_neighbours():
    values = [torch.randn(4, 4), torch.randn(6)]
    grads = [[torch.randn(4, 4), torch.randn(6)] for _ in range(4)]
    together = run(values, grads)
    alone = [run([values[place]], [[step[place]] for step in grads])[0] for place in (0, 1)]
    louder = run(values, [[step[0], 100 * step[1]] for step in grads])
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])
    assert torch.equal(together[0], louder[0])
    assert not torch.equal(together[1], louder[1])


# --- the trust ratio


@pytest.mark.parametrize("norm", [1e-4, 0.1, 3.0, 10.0, 500.0])
@pytest.mark.parametrize("grad_scale", [1e-3, 1.0, 1e4])
def test_the_step_is_as_long_as_the_clamped_weights(norm, grad_scale):
    value = torch.randn(6, 5, dtype=torch.float64)
    value *= norm / length(value)
    grad = grad_scale * torch.randn(6, 5, dtype=torch.float64)
    moved = take_step(value, grad, lr=0.01, clamp=(0.01, 10.0)) - value
    assert length(moved) == pytest.approx(0.01 * min(max(norm, 0.01), 10.0), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e3, 1e8])
def test_the_trajectory_is_free_of_the_gradients_scale(scale):
    values = [torch.randn(5, 5, dtype=torch.float64)]
    grads = [[torch.randn(5, 5, dtype=torch.float64)] for _ in range(8)]
    ordinary = run(values, grads, eps=1e-14)[0]
    scaled = run(values, [[scale * grad] for (grad,) in grads], eps=1e-14)[0]
    torch.testing.assert_close(scaled, ordinary, rtol=1e-7, atol=1e-9)
    assert length(ordinary - values[0]) > 0.05


def test_gradient_clipping_changes_nothing():
    value, grad = torch.randn(30, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    clipped = grad / length(grad) * 0.1
    torch.testing.assert_close(
        take_step(value, clipped, eps=1e-14), take_step(value, grad, eps=1e-14), rtol=1e-9, atol=1e-12
    )


def test_a_tensor_that_starts_at_zero_takes_the_plain_step():
    grad = torch.tensor([2.0, -3.0, 0.0], dtype=torch.float64)
    found = take_step(torch.zeros(3, dtype=torch.float64), grad, lr=0.02, weight_decay=0.7)
    direction = 0.1 * grad / ((0.001 * grad**2).sqrt() + 1e-6)
    torch.testing.assert_close(found, -0.02 * direction, rtol=1e-12, atol=0)


def test_a_lower_bound_takes_the_place_of_a_zero_norm():
    found = take_step(torch.zeros(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64), lr=0.1, clamp=(0.5, 2))
    assert length(found) == pytest.approx(0.05, rel=1e-9)


def test_without_gradient_and_decay_nothing_moves():
    value = torch.randn(4)
    assert torch.equal(take_step(value, torch.zeros(4), weight_decay=0.0), value)
    assert torch.equal(take_step(torch.zeros(4), torch.zeros(4)), torch.zeros(4))


def test_without_gradient_the_decay_alone_shrinks_by_the_rate():
    # u = w * theta, so w cancels in the ratio
    value = torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(
        take_step(value, torch.zeros(4, dtype=torch.float64), lr=0.25, weight_decay=1e-3), 0.75 * value
    )


def test_one_entry_without_gradient_stays_finite():
    found = take_step(torch.ones(3), torch.tensor([1.0, 0.0, -1e-30]), eps=1e-6, weight_decay=0.0)
    assert bool(torch.isfinite(found).all())
    assert float(found[1]) == 1.0


def test_parameters_without_gradient_are_left_alone():
    used, unused = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    before = unused.detach().clone()
    optimizer = LALR([unused, used], weight_decay=0.5)
    used.grad = torch.randn(3)
    optimizer.step()
    assert torch.equal(unused, before)
    assert unused.grad is None
    assert set(optimizer.state) == {used}


def test_a_gradient_that_is_missing_once_leaves_the_running_means_alone():
    value = torch.randn(5, dtype=torch.float64)
    first, third = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    (found,) = run([value], [[first], [None], [third]])
    np.testing.assert_allclose(found.numpy(), naive(value.numpy(), [first.numpy(), third.numpy()], **DEFAULTS), 1e-13)


# --- behaviour as an optimiser


def test_gradients_are_only_read():
    weight = nn.Parameter(torch.randn(3, 3))
    weight.grad = torch.randn(3, 3)
    grad, kept = weight.grad, weight.grad.clone()
    LALR([weight], weight_decay=0.1).step()
    assert weight.grad is grad
    assert torch.equal(grad, kept)


def test_state_has_the_dtype_and_memory_format_of_the_parameter():
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(torch.bfloat16).to(memory_format=torch.channels_last))
    weight.grad = torch.randn_like(weight)
    before = weight.detach().clone()
    optimizer = LALR([weight], lr=0.1, weight_decay=0.0)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        buffer = optimizer.state[weight][name]
        assert buffer.dtype == torch.bfloat16
        assert buffer.is_contiguous(memory_format=torch.channels_last)
    assert length(weight - before) == pytest.approx(0.1 * length(before), rel=0.05)


def test_a_step_reads_no_value_back_from_the_device():
    weight = nn.Parameter(torch.empty(3, 3, device="meta"))  # has no values to read
    weight.grad = torch.empty(3, 3, device="meta")
    optimizer = LALR([weight])
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].device.type == "meta"


def test_training_goes_on_bit_by_bit_from_a_saved_state():
    def advance(net: nn.Module, optimizer: LALR, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = lambda net: [{"params": net[0].parameters(), "lr": 0.05}, {"params": net[2].parameters()}]  # noqa: E731
    optimizer = LALR(groups(net), lr=0.02, betas=(0.8, 0.99), clamp=(0.0, 3.0))
    advance(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    advance(net, optimizer, range(3, 6))

    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    resumed.load_state_dict(checkpoint["net"])
    resumed_optimizer = LALR(groups(resumed), lr=9.0)
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    middle = copy.deepcopy(resumed.state_dict())
    advance(resumed, resumed_optimizer, range(3, 6))
    for name, value in net.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
        assert not torch.equal(middle[name], value), name


def test_schedulers_reach_the_rate():
    weight = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
    optimizer = LALR([weight], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    lengths = []
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        scheduler.step()
        lengths.append(length(weight - before) / length(before))
    assert lengths == [pytest.approx(0.1, rel=1e-9), pytest.approx(0.01, rel=1e-9)]


def test_post_step_hooks_fire_once_per_step():
    # the counter of executed steps in AdversarialTraining hangs on this
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = LALR([weight])
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    optimizer.step()
    optimizer.step()
    assert len(seen) == 2
    assert not torch.equal(seen[0], torch.ones(2))


def test_a_closure_runs_once_with_gradients_and_before_the_update():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LALR([weight], lr=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 25.0
    assert length(weight) < 5.0


def test_it_returns_nothing_without_a_closure():
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    assert LALR([weight]).step() is None


# --- refused


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(UsageError, match="sparse=False"):
        LALR(embedding.parameters()).step()
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -1e-9}, "weight_decay=-1e-09"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"eps": 0.0}, "eps=0.0"),  # an entry whose gradient is zero would become NaN
        ({"eps": math.nan}, "eps=nan"),
        ({"betas": (1.0, 0.9)}, "betas="),
        ({"betas": (0.9, -0.1)}, "betas="),
        ({"betas": (0.9, math.nan)}, "betas="),
        ({"betas": (0.9,)}, "betas="),
        ({"betas": (0.9, 0.99, 0.999)}, "betas="),
        ({"clamp": (2.0, 1.0)}, "clamp="),
        ({"clamp": (-1.0, 1.0)}, "clamp="),
        ({"clamp": (0.0, 0.0)}, "clamp="),
        ({"clamp": (0.0, math.nan)}, "clamp="),
        ({"clamp": (10.0,)}, "clamp="),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_named(settings, named):
    with pytest.raises(UsageError, match=named):
        LALR([nn.Parameter(torch.ones(1))], **settings)


def test_usage_errors_are_value_errors_like_those_of_torch():
    with pytest.raises(ValueError, match="lr"):
        LALR([nn.Parameter(torch.ones(1))], lr=-1.0)
