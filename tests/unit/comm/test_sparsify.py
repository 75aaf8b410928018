"""Sparsifiers against sorting and counting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robustdist.comm import DGC, RandomK, TopK
from robustdist.comm.sparsify import kept, largest


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through(codec, x: Tensor, **key: object) -> Tensor:
    return codec.decompress(codec.compress(x, **key))


def naive_top(x: Tensor, k: int) -> Tensor:
    """Sort by magnitude, earlier entries first among equals, and keep k."""
    values = x.double().tolist()
    order = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:k]
    out = torch.zeros_like(x)
    out[order] = x[order]
    return out


INPUTS = {
    "gaussian": lambda n: gaussian(n),
    "heavy": lambda n: gaussian(n) / gaussian(n, seed=1).abs(),
    "ties": lambda n: (2 * gaussian(n)).round(),
    "equal": lambda n: torch.ones(n) * (1 - 2.0 * (torch.arange(n) % 3 == 0)),
    "mostly zero": lambda n: gaussian(n) * (torch.arange(n) % 997 == 0),
    "one": lambda n: torch.zeros(n).index_fill(0, torch.tensor(n // 2), -3.0),
    "periodic": lambda n: torch.where(torch.arange(n) % 4 == 3, 5.0, 1.0) * gaussian(n),
    "growing": lambda n: torch.arange(n) / n,
    "tiny": lambda n: 1e-44 * gaussian(n),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.3, 1.0])
def test_top_k_is_exact_on_any_input(kind, ratio):
    for n in (1, 10, 5000, 40_000, 140_001):
        x = INPUTS[kind](n)
        assert torch.equal(through(TopK(ratio), x), naive_top(x, kept(n, ratio))), n


def test_magnitude_decides_and_the_sign_is_sent():
    assert through(TopK(0.25), torch.tensor([-5.0, 1.0, 0.5, -0.1])).tolist() == [-5, 0, 0, 0]


def test_sent_and_left_make_the_whole():
    for values in ("fp32", "fp16"):
        x = gaussian(70_000)
        sent = through(TopK(0.1, values=values), x)
        assert torch.equal(sent + (x - sent), x)


def test_the_sampled_threshold_may_mislead_but_not_the_result():
    stride = 600_000 // 2**14
    x = gaussian(600_000)
    x[::stride] = 100 + x[::stride].abs()  # the sample sees nothing but outliers
    assert torch.equal(torch.sort(largest(x, 60_000)).values, torch.sort(x.abs().topk(60_000).indices).values)
    x[::stride] = 0  # nothing but zeros
    assert torch.equal(torch.sort(largest(x, 6000)).values, torch.sort(x.abs().topk(6000).indices).values)


def test_places_are_ascending():
    places = largest(gaussian(200_000), 3000)
    assert (places[1:] > places[:-1]).all()


def test_the_payload_is_what_the_docstring_says():
    x = torch.zeros(70_000)
    x[[3, 65_535, 65_536, 69_999]] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    data = TopK(4 / 70_000).compress(x).data
    assert data[:8].view(torch.int32).tolist() == [2, 2]
    assert data[8:24].view(torch.float32).tolist() == [1, -2, 3, -4]
    assert (data[24:].view(torch.int16).long() + 2**15).tolist() == [3, 65_535, 0, 4463]


def test_half_values_keep_eleven_bits_at_any_scale():
    for scale in (1e-42, 1e-30, 1.0, 1e5, 1e37):
        x = scale * gaussian(3000).double()
        sent = through(TopK(0.05, values="fp16"), x.float())
        full = through(TopK(0.05), x.float())
        assert torch.equal(sent != 0, full != 0)
        if scale > 1e-37:
            assert ((sent - full).abs() <= 2.0**-11 * full.abs()).all()


@pytest.mark.parametrize("n", [1, 99, 1000, 131_072 + 500])
def test_random_k_takes_one_of_every_run(n):
    x = 1 + gaussian(n).abs()
    for ratio in (0.01, 0.3, 1.0):
        decoded = through(RandomK(ratio), x)
        for begin in range(0, n, 131_072):
            part, out = x[begin : begin + 131_072], decoded[begin : begin + 131_072]
            k = max(1, math.ceil(round(len(part) * ratio, 6)))
            bounds = [run * len(part) // k for run in range(k + 1)]
            (places,) = torch.nonzero(out, as_tuple=True)
            assert len(places) == k
            assert all(
                low <= place < high for low, place, high in zip(bounds, places.tolist(), bounds[1:], strict=False)
            )
            lengths = torch.tensor(bounds).diff()
            assert torch.allclose(out[places], part[places] * lengths, rtol=1e-6)


def test_random_k_chooses_evenly():
    counts = torch.zeros(100)
    for step in range(2000):
        counts += through(RandomK(0.1), torch.ones(100), step=step) != 0
    assert counts.sum() == 2000 * 10
    assert ((counts - 200).abs() < 4.5 * math.sqrt(200 * 0.9)).all()


def test_random_k_values_of_ranks_can_be_added():
    xs = [gaussian(1000, seed=rank) for rank in range(3)]
    payloads = [RandomK(0.1).compress(x, rank=rank, step=4) for rank, x in enumerate(xs)]
    codec, total = RandomK(0.1), payloads[0].data.clone()
    for payload in payloads[1:]:
        codec.summable(total).add_(codec.summable(payload.data))
    out = torch.empty(1000)
    codec.decode(total, out)
    assert torch.allclose(out, through(codec, sum(xs), step=4), rtol=1e-5, atol=1e-5)


def test_random_k_without_the_factor_sends_entries_as_they_are():
    x = gaussian(1000)
    decoded = through(RandomK(0.1, scaled=False), x)
    assert torch.equal(decoded[decoded != 0], x[decoded != 0])
    assert torch.equal(decoded != 0, through(RandomK(0.1), x) != 0)


def test_kept_rounds_up_and_floats_do_not_add_one():
    assert [kept(100, 0.07), kept(10, 0.01), kept(1000, 0.29), kept(10, 1e-9), kept(0, 0.5)] == [7, 1, 290, 1, 0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_is_momentum_before_the_selection(nesterov):
    codec = DGC(0.1, momentum=0.8, nesterov=nesterov)
    momentum, velocity = torch.zeros(200), torch.zeros(200)
    for step in range(8):
        grad = gaussian(200, seed=step)
        momentum = 0.8 * (momentum + grad) if nesterov else 0.8 * momentum + grad
        velocity = velocity + momentum + (grad if nesterov else 0)
        expected = naive_top(velocity, 20)
        assert torch.allclose(through(codec, grad), expected, atol=1e-5)
        momentum[expected != 0] = 0
        velocity[expected != 0] = 0
    assert torch.allclose(codec.memory.get("", "momentum"), momentum, atol=1e-5)
    assert torch.allclose(codec.memory.get(""), velocity, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_dgc_gives_parameters_that_are_sent_whole_ordinary_momentum(nesterov, scale):
    memory, momentum = DGC(momentum=0.8, nesterov=nesterov).make_memory(), torch.zeros(20)
    for step in range(5):
        grad = gaussian(20, seed=step)
        momentum = 0.8 * (momentum + grad) if nesterov else 0.8 * momentum + grad
        expected = momentum + grad if nesterov else momentum
        assert torch.allclose(memory.dense("bias", scale * grad, scale=scale) / scale, expected, atol=1e-6)
        memory.commit()
        memory.dense("bias", gaussian(20, seed=99))
        memory.rollback()
        assert not memory.dense("bias", torch.full((20,), math.nan)).isfinite().any()
        memory.commit()
    assert torch.allclose(memory.get("bias", "momentum"), momentum, atol=1e-6)


def test_dgc_keeps_tensors_apart_by_name():
    codec = DGC(0.1)
    codec.compress(torch.ones(20), name="a")
    assert torch.equal(through(codec, torch.ones(20), name="b"), through(DGC(0.1), torch.ones(20)))
