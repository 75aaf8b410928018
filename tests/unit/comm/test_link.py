"""Predicted times against hand-made ones, and the choice of a codec that rests on them."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from robustdist.comm import BF16, DGC, QSGD, Compressor, Identity, Int8, RandomK, TopK
from robustdist.comm.cost import CodecSpeed, Link, fastest, keeps_residuals, predict_seconds
from robustdist.comm.link import CANDIDATES, measure_codec, measure_link, pick_compressor
from robustdist.core.testing import run_ranks

MILLION = 2**20
NS = 1e-9
#: Send and receive of CANDIDATES, of the size that one core takes.
SPEEDS = [CodecSpeed(), CodecSpeed(1 * NS, 0.6 * NS), CodecSpeed(3 * NS, 0.6 * NS), CodecSpeed(4 * NS, 1 * NS)]
LINK = Link(0.001, 1e6, 5e5)


@pytest.mark.parametrize(
    ("codec", "world_size", "options", "seconds"),
    [
        (Identity(), 1, {}, 0.0),
        (Identity(), 2, {}, 0.001 + 4 * MILLION / 1e6),
        (Identity(), 4, {}, 0.001 + 1.5 * 4 * MILLION / 1e6),
        # a scale of 4 bytes per 512 elements; two ranks gather: one payload is sent, two are decoded
        (Int8(), 2, {}, 0.002 + (1 + 4 / 512) * MILLION / 5e5 + MILLION * (3 + 2 * 0.6) * NS),
        (BF16(), 2, {}, 0.002 + 2 * MILLION / 5e5 + MILLION * (3 + 2 * 0.6) * NS),
        # four chunks: three of them sent, the own one sent to three
        (QSGD(4), 4, {}, 0.003 + 1.5 * (0.5 + 4 / 512) * MILLION / 5e5 + MILLION * (3 + 0.6 + 3 / 4 + 0.6) * NS),
        (QSGD(4), 4, {"sides": 1, "collective": "chunked"},
         0.003 + 0.75 * (0.5 + 4 / 512 + 4) * MILLION / 5e5 + MILLION * (3 + 0.6 + 0.6) * NS),
        (Int8(), 4, {"collective": "gather"},
         0.002 + 3 * (1 + 4 / 512) * MILLION / 5e5 + MILLION * (3 + 4 * 0.6) * NS),
        # half of the values, added up by an all-reduce
        (RandomK(0.5), 2, {}, 0.002 + 2 * MILLION / 1e6 + MILLION * (3 + 0.6) * NS),
    ],
    ids=repr,
)  # fmt: skip
def test_predictions_are_those_made_by_hand(codec, world_size, options, seconds):
    found = predict_seconds(codec, MILLION, world_size, LINK, CodecSpeed(3 * NS, 0.6 * NS), **options)
    assert found == pytest.approx(seconds, rel=1e-4)
    doubled = Link(0.002, 5e5, 2.5e5)
    assert predict_seconds(codec, MILLION, world_size, doubled, **options) == pytest.approx(
        2 * predict_seconds(codec, MILLION, world_size, LINK, **options)
    )


def choice(gigabits: float, world_size: int = 2, numel: int = 25_000_000, latency: float = 1e-4) -> Compressor:
    return fastest(CANDIDATES, SPEEDS, numel, world_size, Link(latency, gigabits * 1e9 / 8))


def test_slow_links_get_few_bits_and_fast_ones_none():
    for world_size in (2, 3, 4, 8):
        assert repr(choice(0.1, world_size)) == repr(QSGD(4))
        assert repr(choice(100.0, world_size)) == "Identity()"
    # fewer bits are never chosen on a faster link
    sent = [choice(10 ** (place / 8 - 2)).payload_bytes(1000) for place in range(40)]
    assert sent == sorted(sent)
    assert len(set(sent)) >= 3


def test_a_coarser_codec_has_to_be_clearly_faster():
    assert fastest((Identity(), BF16()), [CodecSpeed()] * 2, 1000, 2, Link(0.0, 1e6), margin=0.49).payload_bytes(1) == 2
    assert fastest((Identity(), BF16()), [CodecSpeed()] * 2, 1000, 2, Link(0.0, 1e6), margin=0.51).payload_bytes(1) == 4
    assert repr(choice(0.1, numel=100, latency=1e-2)) == "Identity()", "one collective is faster than two"
    assert repr(choice(0.001, world_size=1)) == "Identity()"


def test_measured_speeds_are_of_the_codec_in_its_engine():
    assert measure_codec(Identity()) == CodecSpeed()
    for codec in (BF16(), QSGD(4), TopK(0.01), DGC()):
        speed = measure_codec(codec, 3000, repeats=2)
        assert 0 < speed.receive < 1e-3
        assert 0 < speed.send < 1e-3
    assert [keeps_residuals(codec) for codec in (Identity(), BF16(), Int8(), QSGD(4).contractive())] == [
        False, False, True, True,
    ]  # fmt: skip


def test_all_ranks_measure_the_same_and_pick_the_same():
    slow = Link(1e-3, 1e4)

    def run(rank: int) -> tuple[Link, str, str]:
        group = dist.new_group()
        link = measure_link(group, repeats=1)
        return link, repr(pick_compressor(2000, link, group)), repr(pick_compressor(2000, slow, group))

    (link, picked, on_slow), *others = run_ranks(run, 2)
    assert others == [(link, picked, on_slow)]
    assert 0 < link.latency < 10
    assert 1e3 < link.bandwidth < 1e12
    assert on_slow == repr(QSGD(4))


def test_a_single_process_has_nothing_to_measure():
    def run(rank: int) -> tuple[Link, str]:
        return measure_link(), repr(pick_compressor(10**6, Link(0.0, 1.0)))

    assert run_ranks(run, 1) == [(Link(0.0, math.inf), "Identity()")]
