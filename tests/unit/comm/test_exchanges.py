"""One exchange over the ranks, and the choice between its forms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from robustdist import UsageError
from robustdist.comm import (
    BF16,
    DGC,
    EF21,
    QSGD,
    Identity,
    Int8,
    RandomK,
    Sign,
    TopK,
)
from robustdist.comm.collectives import Chunked, Gather, Key, Native, chunks, run_pipelined
from robustdist.comm.cost import choose, dense_bytes, segment_length, sent_bytes
from robustdist.comm.ends import Whole
from robustdist.core.testing import run_ranks

pytestmark = pytest.mark.slow


def exchange_all(rank: int, world_size: int) -> list[tuple[str, bool, float, int]]:
    """All codecs through all collectives: digest, agreement of ``sent`` with the codec, error, bytes."""
    group = dist.group.WORLD
    results = []
    for codec in (Identity(), Int8(), QSGD(4), Sign(), TopK(0.2), RandomK(0.5)):
        for kind, size in ((Chunked, 5000), (Chunked, 700), (Chunked, 1), (Gather, 5000), (Native, 5000)):
            if kind is Native and not codec.linear:
                continue
            xs = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
            x, out, sent = xs[rank].clone(), torch.full((size,), 7.0), torch.full((size,), 7.0)
            exchange = kind(Whole(x, out, sent), 0, size, codec, group, Key(3, "k"))
            bytes_sent = run_pipelined([exchange])
            assert exchange.error is None
            assert torch.equal(x, xs[rank]), "the input is left alone"
            mean = sum(xs) / world_size
            error = float((out - mean).norm() / mean.norm())
            close = float((sent - x).norm() / x.norm())
            results.append((f"{codec!r} {kind.__name__} {size}", out, error, close, bytes_sent))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_exchange_ends_alike_on_all_ranks(world_size):
    ranks = run_ranks(lambda rank: exchange_all(rank, world_size), world_size)
    for rows in zip(*ranks, strict=True):
        name, out, error, *_ = rows[0]
        assert all(torch.equal(row[1], out) for row in rows), name
        bound = {"Iden": 1e-6, "Int8": 0.03, "QSGD": 0.6, "Sign": 1.0, "TopK": 0.8, "Rand": 2.0}[name[:4]]
        assert error <= bound, name
        assert all(row[3] <= bound for row in rows), name
        codec = eval(name.split(") ")[0] + ")")
        kind, size = name.split()[-2:]
        expected = sent_bytes(codec, int(size), world_size, kind.lower())
        mean_bytes = sum(row[4] for row in rows) / world_size
        assert mean_bytes == pytest.approx(expected, abs=9), name


def test_chunks_cover_everything_once_at_blocks():
    for numel in (0, 1, 511, 512, 513, 5000, 10_240):
        for world_size in (1, 2, 3, 4, 7):
            ranges = chunks(numel, world_size, 512)
            assert len(ranges) == world_size
            assert [begin for begin, _ in ranges][1:] == [end for _, end in ranges][:-1]
            assert (ranges[0][0], ranges[-1][1]) == (0, numel)
            assert all(begin % 512 == 0 or begin == numel for begin, _ in ranges)


@pytest.mark.parametrize("codec", [Int8(), QSGD(4), Sign(), TopK(0.01), TopK(0.0001), BF16(), RandomK(0.01)], ids=repr)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_segment_is_the_shortest_that_makes_long_messages(codec, world_size):
    length = segment_length(codec, world_size)

    def message(numel: int) -> int:
        parts = 1 if choose(codec, numel, world_size) == "gather" else world_size
        return codec.payload_bytes(numel) // parts

    assert length % 2**18 == 0
    assert message(length) >= 2**15 or length == 2**22
    assert message(length // 2) < 2**15 or length == 2**18


def test_the_choice_of_a_collective():
    million = 10**6
    assert [choose(Int8(), million, n) for n in (2, 3, 4)] == ["gather", "chunked", "chunked"]
    assert choose(TopK(), million, 4) == choose(DGC(), million, 4) == choose(EF21(), million, 4) == "gather"
    assert choose(RandomK(), million, 4) == choose(Identity(), million, 2) == "native"
    assert choose(Int8(), million, 2, "chunked") == "chunked"
    with pytest.raises(UsageError, match="collective='native' adds payloads"):
        choose(Int8(), 1, 2, "native")
    with pytest.raises(UsageError, match="collective='ring' must be one of"):
        choose(Int8(), 1, 2, "ring")


@pytest.mark.parametrize("codec", [Int8(), QSGD(4), Sign()], ids=repr)
def test_chunks_send_within_a_hundredth_of_the_floor(codec):
    numel = 25_000_000
    for world_size in (2, 3, 4):
        floor = 2 * (world_size - 1) / world_size * codec.payload_bytes(numel)
        assert floor <= sent_bytes(codec, numel, world_size, "chunked") + 8 <= 1.01 * floor
        one_sided = sent_bytes(codec, numel, world_size, "chunked", sides=1)
        assert one_sided == pytest.approx(floor / 2 + dense_bytes(numel, world_size) / 2, rel=0.01)
