"""Every codec: round trip, size, error, zeros and non-finite numbers, constants."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robustdist import comm
from robustdist.comm import (
    PowerSGD,
    RandomK,
)
from robustdist.comm.registry import COMPRESSORS
from tests.unit.comm.codec_family import LARGE, ROWS, Row, gaussian, only, size

SIZES = [1, 2, 7, 8, 9, 63, 511, 512, 513, 1000, 4097]


SHAPES = [(), (1,), (7,), (3, 5, 7), (1, 513), (600, 1), (2, 3, 1, 90)]


@pytest.fixture(params=ROWS, ids=lambda row: row.id)
def row(request) -> Row:
    return request.param


def test_every_codec_of_the_registry_has_a_row():
    assert {type(row.make()) for row in ROWS} == set(COMPRESSORS.values())
    assert {kind.__name__ for kind in COMPRESSORS.values()} <= set(comm.__all__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_shape_and_type_come_back(row, dtype):
    for shape in SHAPES:
        codec, x = row.make(), gaussian(*shape).to(dtype)
        payload = codec.compress(x)
        assert (payload.data.dtype, payload.data.dim(), payload.data.is_contiguous()) == (torch.uint8, 1, True)
        assert payload.num_bytes == len(payload.data) == size(codec, x), shape
        decoded = codec.decompress(payload)
        assert (decoded.shape, decoded.dtype) == (x.shape, dtype)
        assert decoded.isfinite().all()


def test_nothing_is_sent_for_nothing(row):
    codec = row.make()
    for shape in ((0,), (2, 0, 3)):
        payload = codec.compress(torch.empty(shape))
        assert payload.num_bytes == codec.payload_bytes(0) == row.bytes(0)
        assert codec.decompress(payload).shape == shape


def test_bytes_are_those_of_the_formula(row):
    codec = row.make()
    for n in (*SIZES, 131072, LARGE):
        expected = row.bytes(n)
        assert codec.compress(gaussian(n), name=str(n)).num_bytes == expected, n
        assert codec.payload_bytes(n) == codec.payload_bytes((n,)) == expected, n


def test_the_error_is_what_it_should_be(row):
    for n in (5000, LARGE):
        codec, x = row.make(), gaussian(n)
        error = (codec.decompress(codec.compress(x)) - x).norm() / x.norm()
        assert 0.5 * row.error <= error <= row.error, n


@only(lambda row: row.id != "FP16")
def test_the_error_does_not_depend_on_the_scale(row):
    for scale in (1e-30, 1e-6, 1e6, 1e30):
        x = scale * gaussian(5000).double()
        codec = row.make()
        decoded = codec.decompress(codec.compress(x.float())).double()
        assert (decoded - x).norm() / x.norm() <= max(row.error, 1e-7), scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_types_are_encoded_as_their_float32_value(row, dtype):
    x = gaussian(1500).to(dtype)
    if row.id == "Identity":
        assert torch.equal(row.make().decompress(row.make().compress(x)), x)
        return
    assert torch.equal(row.make().compress(x).data, row.make().compress(x.float()).data)


@only(lambda row: row.id not in ("FP16", "BF16", "TopK-fp16"))  # these round them to infinity
def test_the_largest_floats_survive(row):
    x = torch.full((600,), torch.finfo(torch.float32).max)
    x[::3] *= -1
    if row.id == "RandomK":
        x /= 10.5  # the factor
    if row.id in ("Sign", "PowerSGD"):
        x /= 1e4  # a sum over a block or a row
    codec = row.make()
    assert codec.decompress(codec.compress(x)).isfinite().all()


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided"])
def test_memory_order_does_not_matter(row, layout):
    x = gaussian(4, 6, 5, 7)
    other = {
        "transposed": lambda: x.transpose(0, 3).contiguous().transpose(0, 3),
        "channels_last": lambda: x.contiguous(memory_format=torch.channels_last),
        "strided": lambda: torch.stack([x, -x], -1)[..., 0],
    }[layout]()
    assert not other.is_contiguous()
    assert torch.equal(row.make().compress(other).data, row.make().compress(x).data)


def test_the_input_is_left_alone(row):
    x = gaussian(40, 50).requires_grad_()
    before = x.detach().clone()
    payload = row.make().compress(x)
    assert torch.equal(x, before)
    assert not row.make().decompress(payload).requires_grad


def test_zeros_are_exact(row):
    for n in (1, 9, 513, 3000, LARGE):
        codec = row.make()
        for _ in range(3):  # codecs with a memory stay at zero
            assert torch.equal(codec.decompress(codec.compress(torch.zeros(n))), torch.zeros(n))


def test_a_zero_block_between_others_is_exact(row):
    x = gaussian(2048)
    x[512:1024] = 0
    codec = row.make()
    decoded = codec.decompress(codec.compress(x))
    if row.id != "PowerSGD":  # a matrix has no blocks
        assert torch.equal(decoded[512:1024], torch.zeros(512))
    assert decoded[:512].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_entry_is_seen_and_stays_where_it_is(row, bad):
    for n in (1, 300, 3000, LARGE):
        x = gaussian(n)
        place = n * 2 // 3
        x[place] = bad
        codec = row.make()
        decoded = codec.decompress(codec.compress(x))
        assert not decoded.isfinite().all()
        if row.region is not None:
            begin = place // row.region * row.region
            outside = torch.cat([decoded[:begin], decoded[begin + row.region :]])
            assert outside.isfinite().all()
            assert not decoded[begin : begin + row.region].isfinite().all()


@only(lambda row: row.region is not None and row.region <= 512)
def test_non_finite_neighbours_do_not_change_good_blocks(row):
    x = gaussian(4096)
    spoilt = x.clone()
    spoilt[700:800:7] = math.nan
    spoilt[1030] = math.inf
    good, seen = (row.make().decompress(row.make().compress(v)) for v in (x, spoilt))
    assert torch.equal(seen[:512], good[:512])
    assert torch.equal(seen[1536:], good[1536:])


def test_one_bad_step_poisons_nothing(row):
    codec, x = row.make(), gaussian(1200)
    codec.decompress(codec.compress(x))
    for bad in (math.nan, math.inf):
        spoilt = x.clone()
        spoilt[5] = bad
        assert not codec.decompress(codec.compress(spoilt)).isfinite().all()
        assert codec.decompress(codec.compress(x)).isfinite().all()
    assert all(tensor.isfinite().all() for tensor in tensors(codec.state_dict()))


def tensors(state: object) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in tensors(value)] if isinstance(state, dict) else []


@only(lambda row: row.make().unbiased)
def test_unbiased_ones_are_right_on_average(row):
    codec = row.make()
    x = torch.linspace(-1, 1, 64) + 0.003
    x[10] = 0
    copies, steps = 50, 200
    decoded = torch.stack([codec.decompress(codec.compress(x.repeat(copies), step=step)) for step in range(steps)])
    draws = decoded.double().view(copies * steps, 64)
    standard_error = draws.std(0, correction=0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - x).abs() <= 4 * standard_error + 2e-7).all()


def vectors() -> dict[str, Tensor]:
    normal = gaussian(4096, seed=5)
    one_hot = torch.zeros(4096)
    one_hot[777] = -3.0
    worst = torch.full((4096,), 0.0423)
    worst[::512] = 1.0
    return {
        "gaussian": normal,
        "heavy": normal / gaussian(4096, seed=6).abs().clamp(min=1e-3),
        "one-hot": one_hot,
        "equal": torch.ones(4096),
        "many levels": worst,
        "half a level": torch.cat([torch.full((512,), h).index_fill(0, torch.tensor(0), s) for s, h in
                                   ((127.0, 0.499), (7.0, 0.499), (1.0, 0.499), (3.0, 0.499), (1.0, 0.75))] ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", vectors())
@only(lambda row: not row.make().has_memory)
def test_the_error_keeps_to_the_constants(row, kind):
    x = vectors()[kind]
    codec = row.make()
    draws = 60 if row.draws or isinstance(codec, PowerSGD) else 1
    errors = torch.tensor([
        (codec.decompress(codec.compress(x, step=step, name=str(step))) - x).square().sum() for step in range(draws)
    ])  # fmt: skip
    ratio = errors.mean() / x.square().sum()
    slack = 3 * errors.std() / math.sqrt(draws) / x.square().sum() if draws > 1 else 0.0
    omega, delta = codec.omega(len(x)), codec.delta(len(x))
    assert omega is None or ratio - slack <= omega + 1e-6
    assert delta is None or ratio - slack <= 1 - delta + 1e-6
    assert codec.unbiased == (omega is not None)


@only(lambda row: not row.make().has_memory)
def test_the_contractive_form_is_a_contraction_and_the_same_on_the_wire(row):
    codec = row.make()
    form = codec.contractive()
    assert form.delta(4096) > 0
    assert form.payload_bytes(4097) == codec.payload_bytes(4097)
    assert form.contractive().settings() == form.settings()
    for x in vectors().values():
        error = (form.decompress(form.compress(x, name="w")) - x).square().sum() / x.square().sum()
        assert error <= (1 - form.delta(len(x)) + 1e-6 if not isinstance(form, RandomK) else 1)
