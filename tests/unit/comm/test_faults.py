"""A rank dies, stops, fails or falls behind: all others end soon and say which one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from robustdist.comm import Identity, Int8, Sign
from robustdist.comm.engine import CommEngine
from robustdist.core import roll_call
from robustdist.core.testing import run_ranks
from tests.unit.comm.test_engine import gradients, reduce

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Forked processes inherit it."""
    monkeypatch.setattr(roll_call, "PATIENCE", 2.0)


def survivors(folder: Path, world_size: int, victim: int, run: Callable[[int], str], *, limit: float) -> list[str]:
    """Run ``run`` in processes around a TCP store on rank 0; the texts of all but the victim, which have to end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def worker(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", address, rank=rank, world_size=world_size)
        (folder / f"{rank}").write_text(run(rank))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=worker, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    end = time.monotonic() + limit
    others = [process for rank, process in enumerate(processes) if rank != victim]
    for process in others:
        process.join(max(0.0, end - time.monotonic()))
    ended = [process.exitcode for process in others]
    for process in processes:
        process.kill()
        process.join()
    assert ended == [0] * len(others), "all others have ended"
    return [(folder / f"{rank}").read_text() for rank in range(world_size) if rank != victim]


def caught(engine: CommEngine, rank: int, steps: range) -> str:
    """What backward would raise; close as a strategy does."""
    try:
        for step in steps:
            reduce(engine, rank, step)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing was raised"


@pytest.mark.parametrize(
    ("world_size", "victim", "codec"), [(2, 0, Int8()), (2, 1, Identity()), (3, 0, Identity()), (3, 1, Int8())]
)
def test_a_killed_rank_is_named(tmp_path, world_size, victim, codec):
    def run(rank: int) -> str:
        engine = CommEngine(codec, segment=2048, collective="auto")
        reduce(engine, rank, 0)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            time.sleep(0.7)  # has nothing to do when the roll call begins
        return caught(engine, rank, range(1, 3))

    for text in survivors(tmp_path, world_size, victim, run, limit=15):
        assert f"rank {victim} does not answer, dead or stopped" in text
        assert "gloo" in text or "recv" in text, "the first words of the failure stay"
        assert ("hosts the store" in text) == (victim == 0)
        assert not any(f"rank {other} does not" in text for other in range(world_size) if other != victim)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named(tmp_path, victim):
    def run(rank: int) -> str:
        engine = CommEngine(Int8(), collective="chunked", timeout=1.5)
        reduce(engine, rank, 0)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        return caught(engine, rank, range(1, 3))

    for text in survivors(tmp_path, 3, victim, run, limit=15):
        assert f"rank {victim} does not answer, dead or stopped" in text
        assert ("hosts the store" in text) == (victim == 0)


def test_a_failure_outside_the_codec_reaches_the_others():
    """The others wait for a live rank, with no time limit to speak of: only the roll call can tell them."""

    def run(rank: int) -> str:
        engine = CommEngine(Sign(), timeout=600)
        reduce(engine, rank, 0)
        if rank == 1:

            def broken(*args: object, **kwargs: object) -> None:
                raise ArithmeticError("the memory of this rank broke")

            engine.memory.dense = broken
        text = caught(engine, rank, range(1, 4))
        dist.barrier()  # until the others have ended, the connections of the failed rank stay open
        return text

    for text in run_ranks(run, 3, timeout=20):
        assert "rank 1: ArithmeticError: the memory of this rank broke" in text
        assert "does not answer" not in text


def test_a_rank_that_is_late_or_has_left_is_told_from_a_dead_one():
    def run(rank: int, leave: bool) -> str:
        engine = CommEngine(Int8(), timeout=1.0)
        reduce(engine, rank, 0)
        if rank == 1:
            if leave:
                engine.close()
            time.sleep(3)
            return "" if leave else caught(engine, rank, range(1, 2))
        return caught(engine, rank, range(1, 2))

    first, second = run_ranks(run, 2, False)
    assert "rank 1 does not come to bucket 2, busy or stuck elsewhere" in first
    assert "rank 1 does not come to bucket 2" in second, "and it hears so itself when it comes"
    assert "rank 1 does not take part any more, closed" in run_ranks(run, 2, True)[0]


def test_a_slow_rank_is_waited_for():
    def run(rank: int) -> float:
        engine = CommEngine(Int8(), timeout=30)
        if rank == 1:
            time.sleep(1.3)
        total = float(engine.submit(*gradients(rank, 0), step=0).wait().sum())
        engine.close()
        return total

    first, second = run_ranks(run, 2)
    assert first == second
