"""The engine: means, residuals, failures, counters."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
from robustdist.comm.cost import dense_bytes, sent_bytes
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
