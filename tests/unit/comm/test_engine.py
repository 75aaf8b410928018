"""Collectives and the engine between real processes."""

from __future__ import annotations

import functools
import importlib
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from robustdist import UsageError
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
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from robustdist.comm.collectives import Chunked, Gather, Key, Native, chunks, run_pipelined
from robustdist.comm.cost import choose, dense_bytes, segment_length, sent_bytes
from robustdist.comm.ends import Whole
from robustdist.comm.engine import CommEngine
from robustdist.core.testing import run_ranks

pytestmark = pytest.mark.slow

CODECS = [
    FP16(), BF16(), FP8(), Int8(), QSGD(4), QSGD(3), TernGrad(), Sign(), Natural(), TopK(0.05), RandomK(0.1), DGC(0.05),
    EF21(Int8()), EF21(TopK(0.1)),
]  # fmt: skip
SHAPES = {"a": (70, 50), "bias": (50,), "b": (1025,), "c": (3, 5, 211), "scalar": (), "d": (2003,)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


def gradients(rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients as views of one buffer, different on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    buffer = torch.randn(sum(math.prod(shape) for shape in shapes.values()), generator=generator)
    sizes = [math.prod(shape) for shape in shapes.values()]
    views = zip(shapes.items(), buffer.split(sizes), strict=True)
    return {name: view.view(shape) for (name, shape), view in views}, buffer


def reduce(engine: CommEngine, rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensor:
    return engine.submit(*gradients(rank, step, shapes), step=step).wait()


def exact(world_size: int, step: int) -> Tensor:
    return sum(gradients(rank, step)[1].double() for rank in range(world_size)) / world_size


# --- collectives


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


# --- the engine


def run_engine(rank: int, codec: Compressor, steps: int, **options: object) -> tuple[list[Tensor], dict[str, float]]:
    engine = CommEngine(codec, segment=2048, **options)
    results = []
    for step in range(steps):
        results.append(reduce(engine, rank, step).clone())
        engine.commit()
    stats = engine.comm_stats()
    engine.close()
    return results, stats


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_identity_is_the_mean_bit_for_bit(world_size):
    def both(rank: int) -> bool:
        results, _ = run_engine(rank, Identity(), 5)
        for step, result in enumerate(results):
            _, buffer = gradients(rank, step)
            buffer.mul_(1 / world_size)
            dist.all_reduce(buffer)
            if not torch.equal(buffer, result):
                return False
        return True

    assert run_ranks(both, world_size) == [True] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_codecs_leave_all_ranks_with_the_same_bits(world_size):
    def run(rank: int) -> list[tuple[list[Tensor], float]]:
        return [run_engine(rank, codec, 4)[0] for codec in CODECS]

    ranks = run_ranks(run, world_size, timeout=110)
    for place, codec in enumerate(CODECS):
        for step in range(4):
            results = [rank[place][step] for rank in ranks]
            assert all(torch.equal(result, results[0]) for result in results), codec
            if isinstance(codec, DGC):
                continue  # applies its momentum to them
            small = torch.cat([results[0][3500:3550], results[0][-2004:-2003]])  # bias and scalar are not encoded
            mean = exact(world_size, step)
            assert torch.allclose(small.double(), torch.cat([mean[3500:3550], mean[-2004:-2003]]), atol=1e-6)


@pytest.mark.parametrize("collective", ["chunked", "gather"])
@pytest.mark.parametrize("sides", [1, 2])
def test_nothing_is_lost_whatever_is_cut_anew(collective, sides):
    """Sum of results plus the mean residual of workers plus that of owners is the sum of the means."""
    orders = [list(SHAPES), ["d", "b", "c", "bias", "a", "scalar"], ["c", "a", "d", "b", "scalar", "bias"]]

    def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        engine = CommEngine(Sign(), collective=collective, sides=sides, segment=2048)
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(9):
            shapes = {name: SHAPES[name] for name in orders[step // 3]}
            grads, buffer = gradients(rank, step, shapes)
            engine.submit(grads, buffer, step=step).wait()
            for name, grad in grads.items():
                total[name] += grad
            engine.commit()
        engine.close()
        owned = engine.owned.state_dict()["residual"] if engine.owned is not None else {}
        return total, engine.memory.state_dict()["residual"], owned

    ranks = run_ranks(run, 3)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(9):
        for rank in range(3):
            for name, grad in gradients(rank, step, {name: SHAPES[name] for name in orders[step // 3]})[0].items():
                given[name] += grad.double() / 3
    for name, shape in SHAPES.items():
        kept = torch.zeros(shape, dtype=torch.float64).view(-1)
        for _, workers, owners in ranks:
            if name in workers:
                kept += workers[name].double() / 3
            for key, error in owners.items():
                if key.split("@")[0] == name:
                    offset = int(key.split("@")[1])
                    kept[offset : offset + len(error)] += error.double()
        assert torch.allclose(ranks[0][0][name].view(-1) + kept, given[name].view(-1), atol=1e-4), name
        if name == "a":
            assert kept.norm() > 1
    assert any(owners for _, _, owners in ranks) == (collective == "chunked" and sides == 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_of_one_rank_is_seen_by_all_and_kept_by_none(bad):
    def run(rank: int) -> list[tuple[bool, bool, Tensor]]:
        rows = []
        for codec in (Int8(), QSGD(4), Sign(), TopK(0.05), RandomK(0.1), DGC(0.05), EF21(Int8()), FP16()):
            engine = CommEngine(codec, collective="auto", segment=2048)
            reduce(engine, rank, 0)
            engine.commit()
            before = [memory.state_dict() for memory in engine._memories()]
            grads, buffer = gradients(rank, 1)
            if rank == 1:
                grads["c"][1, 2, 3] = bad
            seen = not engine.submit(grads, buffer, step=1).wait().isfinite().all()
            undone = all(
                torch.equal(memory.state_dict()[slot]["c"], vectors["c"])
                for memory, state in zip(engine._memories(), before, strict=True)
                for slot, vectors in state.items()
                if "c" in vectors
            )
            engine.commit()
            rows.append((seen, undone, reduce(engine, rank, 2)))
            engine.close()
        return rows

    for one, two, three in zip(*run_ranks(run, 3), strict=True):
        assert one[:2] == two[:2] == three[:2] == (True, True)
        assert one[2].isfinite().all()
        assert torch.equal(one[2], two[2])
        assert torch.equal(one[2], three[2])


def test_a_skipped_step_is_as_if_it_had_not_been():
    def run(rank: int) -> bool:
        same = []
        for codec in (Sign(), DGC(0.05), EF21(TopK(0.1))):
            skipped, plain = (CommEngine(codec, segment=2048, collective="auto") for _ in range(2))
            for engine in (skipped, plain):
                reduce(engine, rank, 0)
                engine.commit()
            reduce(skipped, rank, 7)
            skipped.rollback()
            same.append(torch.equal(reduce(skipped, rank, 1), reduce(plain, rank, 1)))
            skipped.close()
            plain.close()
        return all(same)

    assert run_ranks(run, 3) == [True] * 3


def test_the_scale_of_the_loss_does_not_reach_the_residuals():
    def run(rank: int) -> float:
        scaled, plain = CommEngine(Sign(), segment=2048), CommEngine(Sign(), segment=2048)
        worst = 0.0
        for step, scale in enumerate((1024.0, 1024.0, 1.0, 16.0)):
            grads, buffer = gradients(rank, step)
            buffer.mul_(scale)
            scaled.scale = scale
            result = scaled.submit(grads, buffer, step=step).wait() / scale
            worst = max(worst, float((result - reduce(plain, rank, step)).abs().max()))
            scaled.commit()
            plain.commit()
        scaled.close()
        plain.close()
        return worst

    assert max(run_ranks(run, 3)) < 1e-5


class Fragile(Int8):
    """Fails on one rank in one step, while encoding or while decoding."""

    def __init__(self, where: str = "encode") -> None:
        super().__init__()
        self.where = where
        self.armed = False

    def encode_tile(self, x, out, generator):
        if self.armed and self.where == "encode":
            raise ArithmeticError("the codec of this rank broke")
        super().encode_tile(x, out, generator)

    def decode_tile(self, data, out, generator):
        if self.armed and self.where == "decode":
            raise ArithmeticError("the codec of this rank broke")
        super().decode_tile(data, out, generator)

    def contractive(self):
        return self


@pytest.mark.parametrize("where", ["encode", "decode"])
@pytest.mark.parametrize("collective", ["chunked", "gather"])
def test_a_failure_on_one_rank_is_raised_on_all_with_its_text(where, collective):
    def run(rank: int) -> tuple[str, str, float]:
        codec = Fragile(where)
        engine = CommEngine(codec, collective=collective, segment=2048)
        reduce(engine, rank, 0)
        codec.armed = rank == 1
        begin, texts = time.monotonic(), []
        for step in (1, 2):
            try:
                reduce(engine, rank, step)
            except RuntimeError as error:
                texts.append(str(error))
        engine.close()
        return texts[0], texts[1], time.monotonic() - begin

    for first, second, seconds in run_ranks(run, 3):
        assert "rank 1" in first
        assert "the codec of this rank broke" in first
        assert "rank 0" not in first
        assert "the codec of this rank broke" in second, "the engine does not go on"
        assert seconds < 10


def test_ranks_with_different_settings_end_together():
    def run(rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            CommEngine(QSGD(4 if rank == 0 else 3))
        return str(caught.value)

    messages = run_ranks(run, 2)
    assert messages[0] == messages[1]
    assert "QSGD(bits=4" in messages[0]
    assert "QSGD(bits=3" in messages[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sides": 3}, "sides=3 must be 1"),
        ({"segment": 0}, "segment=0"),
        ({"small": 0}, "small=0"),
        ({"collective": "native"}, "collective='native'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_made(options, message):
    with pytest.raises(UsageError, match=message):
        CommEngine(Int8(), **options)


def test_counters_are_those_of_the_formula():
    def run(rank: int) -> dict[str, float]:
        return run_engine(rank, Int8(), 3, collective="chunked")[1]

    layout_total = sum(-(-math.prod(s) // 512) * 512 for s in SHAPES.values() if math.prod(s) >= 1024)
    for world_size in (2, 3):
        ranks = run_ranks(run, world_size)
        segments = [min(2048, layout_total - begin) for begin in range(0, layout_total, 2048)]
        expected = 3 * sum(sent_bytes(Int8(), size, world_size, "chunked") for size in segments)
        expected += 3 * dense_bytes(52, world_size)  # bias, scalar and the flag
        assert sum(stats["bytes_sent"] for stats in ranks) / world_size == pytest.approx(expected, abs=3 * world_size)
        assert {stats["calls"] for stats in ranks} == {stats["steps"] for stats in ranks} == {3}
        assert ranks[0]["bytes_dense"] == pytest.approx(3 * dense_bytes(NUMEL, world_size))
        assert ranks[0]["ratio"] == pytest.approx(ranks[0]["bytes_dense"] / ranks[0]["bytes_sent"])


def test_a_single_process_is_left_alone():
    def run(rank: int) -> bool:
        engine = CommEngine(Sign())
        _, buffer = gradients(rank, 0)
        same = torch.equal(reduce(engine, rank, 0), buffer)
        engine.close()
        return same

    assert run_ranks(run, 1) == [True]


def test_many_small_buckets_with_sleepy_ranks_do_not_hang():
    def run(rank: int) -> float:
        engine = CommEngine(QSGD(4), collective="chunked", small=64)
        generator = torch.Generator().manual_seed(rank)
        total = 0.0
        for step in range(60):
            futures = []
            for bucket in range(4):
                if float(torch.rand((), generator=generator)) < 0.1:
                    time.sleep(0.004)
                shapes = {f"{bucket}": (700 + 13 * bucket,), f"{bucket}s": (5,)}
                futures.append(engine.submit(*gradients(rank, step * 4 + bucket, shapes), step=step))
            total += sum(float(future.wait().double().sum()) for future in futures)
            engine.commit()
        assert (engine.comm_stats()["calls"], engine.comm_stats()["steps"]) == (240, 60)
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(*gradients(rank, 0), step=60)
        return total

    first, *others = run_ranks(run, 3)
    assert others == [first] * 2


# --- inside DDP


@pytest.fixture(scope="module")
def ddp_imported() -> None:
    """Import once what DDP imports when it is made, and not in every process."""
    importlib.import_module("torch._dynamo")


def train(rank: int, codec: Compressor | None, steps: int = 12, **options: object) -> tuple[Tensor, int]:
    """A small network under DDP with small buckets; the weights at the end and the calls of the hook."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 130), nn.ReLU(), nn.Linear(130, 90), nn.ReLU(), nn.Linear(90, 3))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    engine = None
    step = 0
    if codec is not None:
        engine = CommEngine(codec, segment=4096, collective="auto", **options)
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def hook(state, bucket):  # DDP compares annotations, and these would be strings
            grads = {names[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
            return engine.submit(grads, bucket.buffer(), step=step)

        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):  # noqa: B007  # the hook reads it
        with ddp.no_sync():  # accumulation: the second backward hands over the sum
            ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
        ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None:
            engine.commit()
    calls = 0
    if engine is not None:
        calls = int(engine.comm_stats()["calls"])
        engine.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_identity_under_ddp_is_ddp_bit_for_bit(ddp_imported, world_size):
    plain = run_ranks(functools.partial(train, codec=None), world_size)
    through = run_ranks(functools.partial(train, codec=Identity()), world_size)
    assert torch.equal(plain[0][0], through[0][0])
    assert through[0][1] > 12, "several buckets"


@pytest.mark.parametrize("codec", [QSGD(4), Sign(), TopK(0.1), EF21(Int8())], ids=repr)
def test_replicas_under_ddp_stay_the_same(ddp_imported, codec):
    (first, calls), *others = run_ranks(functools.partial(train, codec=codec), 3)
    assert all(torch.equal(first, weights) for weights, _ in others)
    assert first.isfinite().all()
    assert calls > 12
