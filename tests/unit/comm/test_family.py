"""What every codec has to obey. A new codec is one more row in ``ROWS``."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from robustdist import comm
from robustdist.comm import (
    BF16,
    DGC,
    EF21,
    FP8,
    FP16,
    QSGD,
    Compressor,
    Identity,
    Int8,
    Natural,
    Payload,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from robustdist.comm.registry import COMPRESSORS


@dataclass(frozen=True)
class Row:
    """One codec under test.

    ``bytes`` is the size of the payload of n float32 elements, written down here and not read from the codec.
    ``error`` bounds the relative error of a Gaussian vector. ``region`` is how far a non-finite entry may reach: a
    number of elements, or None for the whole tensor.
    """

    id: str
    make: Callable[..., Compressor]
    bytes: Callable[[int], int]
    error: float
    region: int | None = 512
    draws: bool = False
    ranks_alike: bool = False


def up(n: int, per: int) -> int:
    return -(-n // per)


def scaled(*widths: int) -> Callable[[int], int]:
    """A scale for 512 entries, and the fields of the codes."""
    return lambda n: 4 * up(n, 512) + sum(up(n * width, 8) for width in widths)


def top(n: int, ratio: float) -> int:
    return min(n, max(1, up(round(n * ratio * 1e6), 10**6)))


def tiles(n: int) -> list[int]:
    """The pieces of 128 Ki elements."""
    return [min(131072, n - begin) for begin in range(0, n, 131072)]


def square(n: int, rank: int) -> int:
    side = math.ceil(math.sqrt(n))
    numbers = min(rank, up(n, max(side, 1))) * (side + up(n, max(side, 1)))
    return 4 * min(n, numbers)


ROWS = [
    Row("Identity", Identity, lambda n: 4 * n, 0.0, region=1),
    Row("FP16", FP16, lambda n: 2 * n, 2.5e-4, region=1),
    Row("BF16", BF16, lambda n: 2 * n, 2e-3, region=1),
    Row("FP8-e4m3", FP8, scaled(8), 0.03),
    Row("FP8-e5m2", lambda: FP8("e5m2"), scaled(8), 0.06),
    Row("Int8", Int8, scaled(8), 0.0085),
    Row("Int8-64", lambda: Int8(64), lambda n: 4 * up(n, 64) + n, 0.007, region=64),
    Row("QSGD-8", lambda **k: QSGD(8, **k), scaled(8), 0.012, draws=True),
    Row("QSGD-7", lambda **k: QSGD(7, **k), scaled(4, 2, 1), 0.024, draws=True),
    Row("QSGD-6", lambda **k: QSGD(6, **k), scaled(4, 2), 0.048, draws=True),
    Row("QSGD-5", lambda **k: QSGD(5, **k), scaled(4, 1), 0.1, draws=True),
    Row("QSGD-4", lambda **k: QSGD(4, **k), scaled(4), 0.21, draws=True),
    Row("QSGD-3", lambda **k: QSGD(3, **k), scaled(2, 1), 0.5, draws=True),
    Row("QSGD-2", lambda **k: QSGD(2, **k), scaled(2), 1.4, draws=True),
    Row("QSGD-4-nearest", lambda: QSGD(4, stochastic=False), scaled(4), 0.15),
    Row("TernGrad", TernGrad, lambda n: sum(4 * up(t, 512) + up(up(t, 5), 4 if t == 131072 != n else 1) *
        (4 if t == 131072 != n else 1) for t in tiles(n)), 1.4, draws=True),
    Row("Sign", Sign, scaled(1), 0.62),
    Row("Natural", Natural, scaled(8), 0.3, draws=True),
    Row("Natural-nearest", lambda: Natural(stochastic=False), scaled(8), 0.2),
    Row("TopK", TopK, lambda n: 4 * up(n, 65536) + 6 * top(n, 0.01), 0.97, region=None),
    Row("TopK-fp16", lambda: TopK(0.1, values="fp16"),
        lambda n: 4 * up(n, 65536) + 4 * (n > 0) + 4 * top(n, 0.1), 0.8, region=None),
    Row("RandomK", lambda **k: RandomK(0.1, **k), lambda n: 8 + 4 * sum(top(t, 0.1) for t in tiles(n)), 3.6,
        region=131072, draws=True, ranks_alike=True),
    Row("DGC", lambda: DGC(0.05), lambda n: 4 * up(n, 65536) + 6 * top(n, 0.05), 0.9, region=None),
    Row("PowerSGD", lambda **k: PowerSGD(2, **k), lambda n: square(n, 2), 1.0, region=None),
    Row("EF21", lambda: EF21(Int8()), scaled(8), 0.0085),
]  # fmt: skip


def only(claim: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """Run a test for the rows of which ``claim`` is true."""
    return pytest.mark.parametrize("row", [row for row in ROWS if claim(row)], ids=lambda row: row.id)


SIZES = [1, 2, 7, 8, 9, 63, 511, 512, 513, 1000, 4097]
SHAPES = [(), (1,), (7,), (3, 5, 7), (1, 513), (600, 1), (2, 3, 1, 90)]
LARGE = 2 * 131072 + 77


@pytest.fixture(params=ROWS, ids=lambda row: row.id)
def row(request) -> Row:
    return request.param


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def size(codec: Compressor, x: Tensor) -> int:
    return codec.payload_bytes(x.shape if isinstance(codec, PowerSGD) else x.numel(), x.dtype)


def test_every_codec_of_the_registry_has_a_row():
    assert {type(row.make()) for row in ROWS} == set(COMPRESSORS.values())
    assert {kind.__name__ for kind in COMPRESSORS.values()} <= set(comm.__all__)


# --- round trip and size


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


# --- zeros and non-finite numbers


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


# --- draws


def test_bytes_depend_on_seed_rank_step_and_name_alone(row):
    x = gaussian(2000)
    state = torch.get_rng_state()
    payload = row.make().compress(x, rank=1, step=5, name="w").data
    torch.manual_seed(99)
    other = row.make()
    other.compress(gaussian(LARGE), name="another")  # a used codec and used buffers
    assert torch.equal(other.compress(x, rank=1, step=5, name="w").data, payload)
    torch.set_rng_state(state)
    row.make().compress(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("key", [{"rank": 2}, {"step": 6}, {"name": "v"}], ids=str)
def test_draws_differ_between_keys(row, key):
    x = gaussian(2000)
    base = {"rank": 1, "step": 5, "name": "w"}
    same = torch.equal(row.make().compress(x, **base).data, row.make().compress(x, **{**base, **key}).data)
    if isinstance(row.make(), PowerSGD):
        assert same == ("name" not in key), "ranks start alike, and the start is drawn once"
    else:
        assert same == (not row.draws or (row.ranks_alike and "rank" in key))
    if row.draws:
        assert not torch.equal(row.make(seed=0).compress(x).data, row.make(seed=1).compress(x).data)


@only(lambda row: not row.make().has_memory and row.id != "PowerSGD")
def test_calls_are_the_step_by_default(row):
    x, codec = gaussian(2000), row.make()
    counted = [codec.compress(x, name=name).data for name in ("a", "b", "a")]
    given = [row.make().compress(x, step=step, name=name).data for step, name in ((0, "a"), (0, "b"), (1, "a"))]
    assert all(torch.equal(one, other) for one, other in zip(counted, given, strict=True))
    resumed = row.make()
    resumed.load_state_dict(codec.state_dict())
    assert torch.equal(resumed.compress(x, name="a").data, row.make().compress(x, step=2, name="a").data)


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


# --- constants


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


# --- the two levels


def test_decoding_can_add(row):
    codec, x = row.make(), gaussian(700)
    data = codec.compress(x).data
    decoded, total = torch.empty(700), torch.linspace(-1, 1, 700)
    codec.decode(data, decoded)
    codec.decode(data, total, alpha=-0.25)
    assert torch.allclose(total, torch.linspace(-1, 1, 700) - 0.25 * decoded, atol=1e-6)
    none = torch.linspace(-1, 1, 700)
    codec.decode(data, none, alpha=0.0)
    assert torch.equal(none, torch.linspace(-1, 1, 700))


def test_encoding_writes_every_byte_and_no_other(row):
    x = gaussian(LARGE)
    size = row.make().payload_bytes(LARGE)
    buffers = [torch.full((size + 16,), fill, dtype=torch.uint8) for fill in (0, 255)]
    for buffer in buffers:
        row.make().encode(x, buffer[4 : 4 + size], rank=0, step=0)
    payload = buffers[0][4 : 4 + size]
    assert torch.equal(payload, buffers[1][4 : 4 + size])
    assert [int(buffers[1][place]) for place in (0, 3, 4 + size, -1)] == [255] * 4
    if not row.make().has_memory:
        assert torch.equal(payload, row.make().compress(x, step=0).data)
    out, aligned = torch.empty(LARGE), torch.empty(LARGE)
    row.make().decode(payload, out)
    row.make().decode(payload.clone(), aligned)
    assert torch.equal(out, aligned)


def test_a_payload_is_bytes(row):
    codec, x = row.make(), gaussian(5, 103)
    payload = codec.compress(x)
    raw = payload.to_bytes()
    assert len(raw) == payload.num_bytes + 2 + 8 * 2
    rebuilt = Payload.from_bytes(raw)
    assert (rebuilt.shape, rebuilt.dtype) == (payload.shape, payload.dtype)
    assert torch.equal(rebuilt.data, payload.data)
    assert torch.equal(row.make().decompress(rebuilt), row.make().decompress(payload))


def test_codecs_can_be_copied_pickled_and_printed(row):
    codec, x = row.make(), gaussian(900)
    codec.compress(x)
    copies = [pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)]
    expected = codec.compress(x).data
    assert all(torch.equal(other.compress(x).data, expected) for other in copies)
    assert eval(repr(codec), vars(comm)).settings().keys() == codec.settings().keys()
    assert repr(eval(repr(codec), vars(comm))) == repr(codec)


def test_a_resumed_codec_goes_on_exactly(row):
    codec = row.make()
    xs = [gaussian(1100, seed=seed) for seed in range(4)]
    for x in xs[:2]:
        codec.decompress(codec.compress(x, name="w"), name="w")
    resumed = row.make()
    resumed.load_state_dict(copy.deepcopy(codec.state_dict()))
    for x in xs[2:]:
        payloads = [either.compress(x, name="w") for either in (codec, resumed)]
        assert torch.equal(payloads[0].data, payloads[1].data)
        decoded = [e.decompress(p, name="w") for e, p in zip((codec, resumed), payloads, strict=True)]
        assert torch.equal(*decoded)


def test_threads_do_not_disturb_each_other(row):
    inputs = [gaussian(40_000, seed=seed) for seed in range(3)]
    expected = [row.make().compress(x, step=0).data for x in inputs]
    wrong = []

    def work(index: int) -> None:
        for _ in range(10):
            if not torch.equal(row.make().compress(inputs[index], step=0).data, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("direction", ["encode", "decode"])
@only(lambda row: row.id not in ("PowerSGD", "DGC", "TopK-fp16"))
def test_nothing_larger_than_a_tile_is_allocated(row, direction):
    codec, n = row.make(), 6 * 131072
    x, out, data = gaussian(n), torch.empty(n), torch.empty(row.make().payload_bytes(n), dtype=torch.uint8)

    def run() -> None:
        codec.encode(x, data) if direction == "encode" else codec.decode(data, out)

    codec.encode(x, data)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert len(sizes) > 1
    assert max(sizes) <= 4 * 131072
