"""Quantisers against re-derivations written here, and the figures that their errors must have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robustdist.comm import FP8, QSGD, Int8, Natural, Sign, TernGrad, TopK
from robustdist.comm.blocks import dither


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through(codec, x: Tensor, **key: object) -> Tensor:
    return codec.decompress(codec.compress(x, **key))


def blockwise(x: Tensor, block: int):
    """Pairs of the block's slice and its entries as exact Python floats."""
    return [
        (slice(begin, begin + block), x[begin : begin + block].double().tolist()) for begin in range(0, len(x), block)
    ]


# --- formulas


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("block", [8, 24, 512])
def test_nearest_levels(bits, block):
    x = gaussian(1300, seed=bits)
    decoded = through(QSGD(bits, block=block, stochastic=False), x).double()
    levels = 2 ** (bits - 1) - 1
    for part, values in blockwise(x, block):
        spacing = max(map(abs, values)) / levels
        for value, got in zip(values, decoded[part].tolist(), strict=True):
            nearest = round(value / spacing) * spacing
            assert got == pytest.approx(nearest, rel=1e-6) or abs(abs(value / spacing) % 1 - 0.5) < 1e-5


def test_int8_is_qsgd_with_nearest_levels():
    x = gaussian(3000)
    assert torch.equal(Int8().compress(x).data, QSGD(8, stochastic=False).compress(x).data)


def test_integers_up_to_the_highest_level_are_exact():
    x = torch.arange(-127.0, 128)
    assert torch.equal(through(Int8(), x), x)
    for step in range(50):
        assert torch.equal(through(QSGD(8), x, step=step), x)
        assert torch.equal(through(QSGD(4), x[120:135], step=step), x[120:135])


@pytest.mark.parametrize("codec", [QSGD(8), QSGD(5), QSGD(4), QSGD(3), QSGD(2), TernGrad()], ids=repr)
def test_random_rounding_takes_the_level_below_or_above_with_the_right_frequency(codec):
    levels = codec.levels
    x = torch.tensor([1.0, *torch.linspace(-0.99, 0.99, 63).tolist()])
    spacing = 1 / levels
    decoded = through(codec, x.repeat(4096)).view(4096, 64)
    places = decoded / spacing
    assert torch.allclose(places, places.round(), atol=1e-4)
    below = torch.floor(x / spacing)
    up = places.round() - below
    assert set(up.unique().tolist()) <= {0.0, 1.0}
    expected = x / spacing - below
    deviation = (expected * (1 - expected) / 4096).sqrt()
    assert ((up.mean(0) - expected).abs() <= 4 * deviation + 1e-4).all()
    # neighbours in the payload are independent: the variance of a sum is the sum of the variances
    total = (up - expected).sum(1)
    assert total.var() == pytest.approx(float((expected * (1 - expected)).sum()), rel=0.1)


def test_draws_are_symmetric_and_odd():
    lanes = dither(1_000_003, torch.device("cpu"), torch.Generator().manual_seed(3)).int()
    assert len(lanes) == 1_000_003
    assert (lanes % 2 != 0).all()
    assert (int(lanes.min()), int(lanes.max())) == (-32767, 32767)
    for start in range(4):  # all lanes of a 64-bit draw alike
        lane = lanes[start::4].double() / 65536
        assert abs(lane.mean()) < 4 * math.sqrt(1 / 12 / len(lane))
        assert lane.var() == pytest.approx(1 / 12, rel=0.01)


def test_sign_is_the_mean_magnitude():
    x = gaussian(1300)
    decoded = through(Sign(), x).double()
    for part, values in blockwise(x, 512):
        scale = math.fsum(map(abs, values)) / len(values)
        assert decoded[part].tolist() == pytest.approx([math.copysign(scale, value) for value in values], rel=1e-6)


def test_sign_of_zeros():
    decoded = through(Sign(8), torch.tensor([0.0, -0.0, 4.0, -4.0, 0.0, 0.0, 0.0, 0.0]))
    assert decoded.tolist() == [1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0]


def test_one_entry_among_zeros_has_the_error_that_the_constant_allows():
    x = torch.zeros(512)
    x[100] = 1.0
    error = (through(Sign(), x) - x).square().sum()
    assert error == pytest.approx(1 - Sign().delta(512), rel=1e-5)
    assert Sign().delta(512) == 1 / 512


@pytest.mark.parametrize("size", [1, 7, 8, 9, 65])
def test_bits_of_the_padding_reach_no_entry(size):
    x = -gaussian(size).abs() - 0.1
    assert (through(Sign(), x) < 0).all()
    assert torch.equal(through(Sign(), torch.cat([x, x]))[:size].sign(), x.sign())


def test_natural_goes_to_a_neighbouring_power_of_two():
    x = torch.cat([gaussian(200), torch.tensor([1.0, -2.0, 0.25, 1.5, -3.0, 1e-30, 2.0**-120])])
    nearest = through(Natural(stochastic=False), x).double()
    decoded = torch.stack([through(Natural(), x, step=step) for step in range(400)]).double()
    for place, value in enumerate(x.double().tolist()):
        low = math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)
        share = value / low - 1
        assert set(decoded[:, place].tolist()) <= {low, 2 * low}
        frequency = float((decoded[:, place] == 2 * low).double().mean())
        assert abs(frequency - share) <= 4.5 * math.sqrt(share * (1 - share) / 400) + 1e-9
        assert nearest[place] == (2 * low if share >= 0.5 else low)


def test_natural_gives_up_126_powers_below_the_largest():
    x = torch.tensor([1.0, 2.0**-125, 2.0**-126, 0.0])
    assert through(Natural(), x).tolist() == [1.0, 2.0**-125, 0.0, 0.0]
    top = torch.tensor([2.0**127, -(2.0**127) * 1.9, 2.0**100])
    assert through(Natural(stochastic=False), top).tolist() == [2.0**127, -(2.0**127), 2.0**100]


def test_natural_reaches_its_constants():
    worst = torch.full((65536,), 4 / 3)
    error = (through(Natural(), worst) - worst).square().sum() / worst.square().sum()
    assert error == pytest.approx(1 / 8, rel=0.02)
    half = torch.full((512,), 1.5)
    error = (through(Natural(stochastic=False), half) - half).square().sum() / half.square().sum()
    assert error == pytest.approx(1 - Natural(stochastic=False).delta(512), rel=1e-6)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_decodes_every_byte_as_torch_does(format):
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(kind).float()
    finite = values[values.isfinite()]
    x = torch.cat([finite, torch.tensor([torch.finfo(kind).max])])
    assert torch.equal(through(FP8(format), x), x)  # the block's maximum makes the scale 1
    x = gaussian(2000)
    for part, values in blockwise(x, 512):
        scale = torch.tensor(max(map(abs, values))) / torch.finfo(kind).max
        expected = (x[part] * (1 / scale)).to(kind).float() * scale
        assert torch.allclose(through(FP8(format), x)[part], expected, rtol=1e-6, atol=0)


def test_fp8_keeps_to_its_relative_error():
    x = torch.logspace(-4, 0, 4096).view(8, 512).T.reshape(-1)  # every block spans four decades
    for format, bound in (("e4m3", 2.0**-4), ("e5m2", 2.0**-3)):
        error = (through(FP8(format), x) - x).abs() / x
        assert 0.85 * bound <= error.max() <= bound + 1e-6


def test_terngrad_clips_at_multiples_of_the_root_mean_square():
    x = gaussian(1100)
    decoded = through(TernGrad(clip=1.5), x)
    for part, values in blockwise(x, 512):
        bound = min(max(map(abs, values)), 1.5 * math.sqrt(math.fsum(v * v for v in values) / len(values)))
        reached = decoded[part].abs().unique().tolist()
        assert reached == pytest.approx([0.0, bound][-len(reached) :], rel=1e-5)
        assert (decoded[part][x[part] > bound] > 0).all()
    assert torch.equal(through(TernGrad(clip=2.5), torch.ones(5)), torch.ones(5))
    assert torch.equal(through(TernGrad(clip=100), x), through(TernGrad(), x))


def test_terngrad_with_nearest_levels():
    assert through(TernGrad(stochastic=False), torch.tensor([2.0, 1.1, 0.9, -1.2, 0.0])).tolist() == [2, 2, 0, -2, 0]


@pytest.mark.parametrize("codec", [QSGD(4, stochastic=False), QSGD(3, stochastic=False), FP8()], ids=repr)
def test_a_bad_block_has_the_codes_of_zeros(codec):
    # and so no undefined conversion of a NaN, whose bits could fall into a neighbour's
    x = gaussian(2048)
    zeros, spoilt = x.clone(), x.clone()
    zeros[512:1024] = 0
    spoilt[512:1024:2] = math.nan
    spoilt[513:1024:4] = -math.inf
    assert torch.equal(codec.compress(zeros).data[16:], codec.compress(spoilt).data[16:])
    scales = codec.compress(spoilt).data[:16].view(torch.float32)
    assert torch.isnan(scales).tolist() == [False, True, False, False]


def test_blocks_too_small_for_an_inverse_are_zero():
    x = torch.full((512,), 1e-40)
    for codec in (Int8(), QSGD(4), TernGrad(), FP8()):
        assert torch.equal(through(codec, x), torch.zeros(512))
    assert torch.allclose(through(Int8(), 1e4 * x), 1e4 * x, rtol=1e-2)


# --- constants that are reached


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_contraction_constant_of_nearest_levels_is_reached(bits):
    codec = QSGD(bits, stochastic=False)
    x = torch.full((512,), 0.5 - 1e-5)
    x[0] = codec.levels
    error = (through(codec, x) - x).square().sum() / x.square().sum()
    assert error == pytest.approx(1 - codec.delta(512), rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_the_variance_constant_of_random_levels_is_reached(bits):
    codec = QSGD(bits)
    s, others = codec.levels, 511
    x = torch.full((512,), s / (s + math.sqrt(s * s + others)))
    x[0] = s
    x = x.repeat(400)
    error = (through(codec, x) - x).square().sum() / x.square().sum()
    assert error == pytest.approx(codec.omega(512), rel=0.03)
    assert codec.omega(512) == pytest.approx(codec.omega(10**6))
    assert codec.omega(1) == 0


# --- figures of the literature's setting, Gaussian entries in blocks of 512


@pytest.mark.parametrize(
    ("codec", "expected", "tolerance"),
    [
        (Int8(), 0.0074, 0.00015),
        (QSGD(8), 0.0105, 0.0002),
        (QSGD(4), 0.19, 0.005),
        (Sign(), math.sqrt(1 - 2 / math.pi), 0.002),
        (TopK(0.01), 0.957, 0.001),
    ],
    ids=repr,
)
def test_relative_errors_of_gaussian_vectors(codec, expected, tolerance):
    x = gaussian(1 << 19)
    assert float((through(codec, x) - x).norm() / x.norm()) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(Int8(), 8.0625), (QSGD(4), 4.0625), (QSGD(3), 3.0625), (Sign(), 1.0625), (TernGrad(), 1.6625), (TopK(), 0.4805)],
    ids=repr,
)
def test_bits_per_entry(codec, bits):
    assert 8 * codec.payload_bytes(25_000_000) / 25_000_000 == pytest.approx(bits, rel=2e-4)
