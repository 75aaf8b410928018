"""The engine between buckets: notes, another codec, time limits, the end."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from robustdist import RobustDistWarning, UsageError
from robustdist.comm import DGC, EF21, FP16, QSGD, Compressor, Identity, Int8, Sign, TopK
from robustdist.comm.cost import dense_bytes, sent_bytes
from robustdist.comm.engine import CommEngine
from robustdist.comm.grouping import Group, expose
from robustdist.core.testing import run_ranks
from tests.unit.comm.test_engine import CODECS, SHAPES, exact, gradients, reduce

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_note_comes_back_as_the_mean_of_all_ranks(world_size):
    def run(rank: int) -> list[tuple[float, ...]]:
        rows = []
        for codec in (Identity(), Sign(), DGC(0.1)):
            engine = CommEngine(codec, segment=2048)
            for step, note in enumerate(((rank + 0.1, -3.0), (), (float(rank**2),), (math.nan, 1.0))):
                result = engine.submit(*gradients(rank, step), step=step, note=note).wait()
                rows.append(engine.note)
                if isinstance(codec, Identity):
                    assert torch.allclose(result.double(), exact(world_size, step), atol=1e-6)
                engine.commit()
            engine.close()
        return rows

    first, *others = run_ranks(run, world_size)
    assert all(repr(rows) == repr(first) for rows in others), "the same bits"
    for pair, kept, square, bad in zip(*[iter(first)] * 4, strict=True):
        assert pair == kept, "a bucket without a note leaves the last one"
        assert pair == pytest.approx((sum(range(world_size)) / world_size + 0.1, -3.0), rel=1e-6)
        assert square == pytest.approx((sum(r**2 for r in range(world_size)) / world_size,), rel=1e-6)
        assert math.isnan(bad[0])
        assert bad[1] == pytest.approx(1)


def test_a_note_costs_its_bytes_and_no_message_more():
    def run(rank: int) -> list[int]:
        sent = []
        for codec in (Identity(), Int8()):
            engine = CommEngine(codec)
            for step, note in enumerate(((), (1.0,) * 100)):
                engine.submit(*gradients(rank, step), step=step, note=note).wait()
                sent.append(engine.stats.bytes_sent)
            engine.close()
        return sent

    for sent in run_ranks(run, 2):
        assert [sent[1] - 2 * sent[0], sent[3] - 2 * sent[2]] == [dense_bytes(100, 2)] * 2


def test_a_change_of_codec_takes_effect_in_its_place():
    """The first bucket has the bytes and the precision of the old codec, the second those of the new one."""

    def run(rank: int) -> tuple[list[float], int]:
        engine = CommEngine(Int8(), collective="chunked")
        first = engine.submit(*gradients(rank, 0, {"a": SHAPES["a"]}), step=0)
        engine.change(Sign(block=64))
        second = engine.submit(*gradients(rank, 0, {"b": SHAPES["b"]}), step=0)
        errors = []
        for future, name in ((first, "a"), (second, "b")):
            mean = sum(gradients(r, 0, {name: SHAPES[name]})[1] for r in range(2)) / 2
            errors.append(float((future.wait() - mean).norm() / mean.norm()))
        assert repr(engine.codec) == repr(Sign(block=64))
        engine.close()
        return errors, engine.stats.bytes_sent

    ranks = run_ranks(run, 2)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0][0] < 0.02 < 0.4 < ranks[0][0][1]
    expected = sent_bytes(Int8(), 7 * 512, 2, "chunked") + sent_bytes(Sign(block=64), 17 * 64, 2, "chunked")
    assert sum(sent for _, sent in ranks) / 2 == pytest.approx(expected + 2 * dense_bytes(1, 2), abs=3)


class Coarse(TopK):
    """Gathers, with the blocks of codecs that do not."""

    block = 512


def test_nothing_is_lost_when_the_codec_changes():
    """Blocks, collectives and bits change; residuals stay, and what owners keep goes where it is sent on."""
    plan: list[Compressor] = [Sign(block=8), Sign(block=8), QSGD(3), QSGD(2), Coarse(0.1), TopK(0.1), Sign()]

    def run(rank: int) -> tuple[Tensor, Tensor, list[int]]:
        engine = CommEngine(plan[0], segment=2048)
        total, pieces = torch.zeros(NUMEL := sum(map(math.prod, SHAPES.values())), dtype=torch.float64), []
        for step, codec in enumerate(plan):
            if step and codec is not plan[step - 1]:
                engine.change(codec)
            grads, buffer = gradients(rank, step)
            grads["b"].zero_()
            engine.submit(grads, buffer, step=step).wait()
            assert not grads["b"].any(), "no block spans two parameters"
            total += buffer
            engine.commit()
            pieces.append(len(engine.owned.state_dict()["residual"]))
        kept = torch.zeros(NUMEL, dtype=torch.float64)
        places = dict(zip(SHAPES, kept.split([math.prod(shape) for shape in SHAPES.values()]), strict=True))
        for name, error in engine.memory.state_dict()["residual"].items():
            places[name] += error.double() / 3
        for key, error in engine.owned.state_dict()["residual"].items():
            name, offset = key.split("@")
            places[name][int(offset) :][: len(error)] += error.double()
        engine.close()
        return total, kept, pieces

    ranks = run_ranks(run, 3)
    given = torch.zeros_like(ranks[0][0])
    for step in range(len(plan)):
        for rank in range(3):
            grads, buffer = gradients(rank, step)
            grads["b"].zero_()
            given += buffer.double() / 3
    kept = sum(kept for _, kept, _ in ranks)
    assert torch.allclose(ranks[0][0] + kept, given, atol=1e-4)
    assert kept.norm() > 1
    for _, _, pieces in ranks:
        assert pieces[1] > 0
        assert pieces[4:6] == [0, 0], "gathering has no owners, so none may keep anything"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (Int8(), DGC(), r"DGCMemory\(.*the engine has ErrorFeedback\(.*make a new engine"),
        (FP16(), Int8(), r"keeps ErrorFeedback\(.*has no memory"),
        (DGC(momentum=0.9), DGC(momentum=0.5), r"momentum=0.5.*momentum=0.9"),
        (EF21(Int8()), Int8(), "the engine has EF21Memory"),
    ],
)
def test_a_codec_with_another_memory_is_refused(old, new, message):
    def run(rank: int) -> bool:
        engine = CommEngine(old)
        with pytest.raises(UsageError, match=message):
            engine.change(new)
        engine.change(old)
        reduce(engine, rank, 0)
        engine.close()
        return True

    assert run_ranks(run, 1) == [True]


def test_ranks_that_change_differently_end_together():
    def run(rank: int) -> str:
        engine = CommEngine(QSGD(4))
        engine.change(QSGD(3 if rank == 0 else 2))
        with pytest.raises(UsageError, match="different settings") as caught:
            reduce(engine, rank, 0)
        engine.close()
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "QSGD(bits=2" in first


def test_the_end_of_the_engine_is_the_end_of_its_group():
    def run(rank: int) -> float:
        engine, other = CommEngine(Int8()), CommEngine(Int8())
        reduce(engine, rank, 0)
        group = engine._wire.group
        engine.close()
        engine.close()
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
        reduce(other, rank, 0)
        other.close()
        mine = dist.new_group()
        lent = CommEngine(Int8(), group=mine)
        lent.close()
        value = torch.ones(1)
        dist.all_reduce(value, group=mine)
        return float(value)

    assert run_ranks(run, 2) == [2.0, 2.0]


def test_a_rank_that_waits_in_vain_is_not_waited_for():
    def run(rank: int) -> str:
        engine = CommEngine(Int8(), timeout=1.5)
        text = ""
        if rank == 0:
            future = engine.submit(*gradients(rank, 0), step=0)
            with pytest.warns(RobustDistWarning, match=r"rank 0 has waited 0.2 s for other ranks"):
                engine.close(seconds=0.2)
            with pytest.raises(RuntimeError) as caught:
                future.wait()
            text = str(caught.value)
        else:
            time.sleep(2.5)
            engine.close()
        return text

    assert "1500ms" in run_ranks(run, 2)[0]


@pytest.mark.parametrize(
    ("timeout", "group", "message"),
    [(0, None, "timeout=0 must be a positive"), (5, "any", "timeout=5 is for the engine's own group")],
)
def test_wrong_time_limits_are_refused(timeout, group, message):
    with pytest.raises(UsageError, match=message):
        CommEngine(Int8(), timeout=timeout, group=group)


def test_no_codec_gives_anything_to_a_parameter_that_got_no_gradient():
    def run(rank: int) -> list[bool]:
        silent = []
        for codec in [*CODECS, EF21(Sign())]:
            engine = CommEngine(codec)
            grads, buffer = gradients(rank, 0)
            grads["b"].zero_()
            engine.submit(grads, buffer, step=0).wait()
            silent.append(not grads["b"].any())
            engine.close()
        return silent

    assert all(run_ranks(run, 3)[0])


def be_late() -> None:
    """Wait until the other rank is at its own barrier, and then some more."""
    dist.barrier()
    time.sleep(0.25)


def test_each_bucket_of_a_step_has_its_times():
    def run(rank: int) -> list[Group]:
        engine = CommEngine(Int8())
        for step in range(2):
            futures = []
            for name in "abc":
                if rank == 1 and name == "c":
                    be_late()
                futures.append(engine.submit(*gradients(rank, step, {name: SHAPES[name]}), step=step))
            if rank == 0:
                dist.barrier()
            for future in futures:
                future.wait()
        engine.close()
        return engine.bucket_times()

    for rank, groups in enumerate(run_ranks(run, 2)):
        assert [group.names for group in groups] == [("a",), ("b",), ("c",)], "of the last step alone"
        assert [group.num_bytes for group in groups] == [4 * math.prod(SHAPES[name]) for name in "abc"]
        assert groups[0].ready == 0
        assert all(group.ready <= group.begin < group.end for group in groups)
        assert [group.exposed for group in groups] == pytest.approx(
            expose([group.end for group in groups], groups[-1].ready)
        )
        assert rank == 1 or groups[2].exposed > 0.2


def test_identity_has_many_buckets_under_way_and_ends_all_of_them():
    def run(rank: int) -> bool:
        engine = CommEngine(Identity())
        sent = [gradients(rank, step) for step in range(6)]
        futures = [engine.submit(*pair, step=step, note=[step + rank]) for step, pair in enumerate(sent)]
        engine.close()  # without having waited for any
        means = [sum(gradients(other, step)[1] / 3 for other in range(3)) for step in range(6)]
        assert engine.note == pytest.approx((6.0,))
        assert engine.comm_stats()["calls"] == 6
        for future, mean in zip(futures, means, strict=True):
            torch.testing.assert_close(future.value(), mean)
        return True

    assert all(run_ranks(run, 3))


@pytest.mark.parametrize("codec", [Identity(), Int8()], ids=repr)
def test_waiting_and_coding_are_counted_apart(codec):
    def run(rank: int) -> dict[str, float]:
        engine = CommEngine(codec)
        if rank == 1:
            be_late()
        future = engine.submit(*gradients(rank, 0), step=0)
        if rank == 0:
            dist.barrier()
        future.wait()
        engine.close()
        return engine.comm_stats()

    early, late = run_ranks(run, 2)
    assert early["wait_seconds"] > 0.2
    for stats in (early, late):
        assert (stats["codec_seconds"] > 0) == isinstance(codec, Int8)
        assert stats["codec_seconds"] + stats["wait_seconds"] <= stats["seconds"]
