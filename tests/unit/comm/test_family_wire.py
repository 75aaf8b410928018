"""Every codec: draws, what it writes into buffers, copies, threads."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from robustdist import comm
from robustdist.comm import (
    Payload,
    PowerSGD,
)
from tests.unit.comm.codec_family import LARGE, ROWS, Row, gaussian, only


@pytest.fixture(params=ROWS, ids=lambda row: row.id)
def row(request) -> Row:
    return request.param


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
