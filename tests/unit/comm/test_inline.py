"""The engine without a thread, as it works with NCCL, on gloo: the same numbers, and failures at the end of a step."""

from __future__ import annotations

import copy
import functools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm import (
    DGC,
    EF21,
    FP8,
    FP16,
    QSGD,
    Compressor,
    Identity,
    Int8,
    Natural,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from robustdist.comm.engine import CommEngine, RankError
from robustdist.comm.verdicts import Verdicts
from robustdist.core.testing import run_ranks
from tests.unit.comm.test_engine import SHAPES, Fragile, gradients, reduce
from tests.unit.comm.test_engine_ddp import ddp_imported, train

__all__ = ["ddp_imported"]

CODECS: list[Compressor] = [
    Identity(), FP16(), Int8(), QSGD(4), Sign(), TopK(0.05), RandomK(0.1), DGC(0.05), EF21(Int8()), PowerSGD(2),
]  # fmt: skip
#: The buckets of each step: DDP cuts them anew after the first one.
CUTS = [[list(SHAPES)], *[[["d", "scalar"], ["c", "b"], ["bias", "a"]]] * 4]
#: Steps in which a rank has a gradient that is not finite, and one that a scaler skips.
BAD, SKIPPED, UNUSED = {1: (1, "c"), 2: (0, "a")}, 3, {1: "b", 4: "a"}


def kept(engine: CommEngine) -> dict[str, Tensor]:
    return {
        f"{place} {slot} {name}": vector
        for place, memory in enumerate(engine._memories())
        for slot, vectors in memory.state_dict().items()
        for name, vector in vectors.items()
    }


def run_steps(rank: int, codec: Compressor, **options: object) -> tuple[list[Tensor], dict[str, Tensor], list[object]]:
    engine = CommEngine(copy.deepcopy(codec), segment=2048, **options)  # PowerSGD keeps its factors
    if options.get("inline") and options.get("dynamic"):
        engine._wire.nccl = True  # which has no bitwise operations
    results, told = [], []
    for step, cut in enumerate(CUTS):
        futures = []
        for number, names in enumerate(cut):
            grads, buffer = gradients(rank, step, {name: SHAPES[name] for name in names})
            where, name = BAD.get(step, (None, ""))
            if rank == where and name in grads:
                grads[name].view(-1)[7] = math.nan
            if UNUSED.get(step) in grads:
                grads[UNUSED[step]].zero_()
            futures.append(engine.submit(grads, buffer, step=step, note=(rank + step,) if number == 0 else ()))
        results += [future.wait().clone() for future in futures]
        engine.settle()
        told += [engine.note, engine.nonfinite]
        if step == SKIPPED:
            engine.rollback()
        else:
            engine.commit()
    vectors = kept(engine)
    told.append(engine.comm_stats()["bytes_sent"])
    engine.close()
    return results, vectors, told


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "dynamic"), [("auto", True), ("chunked", False)])
def test_all_is_bit_for_bit_what_the_thread_makes_of_it(collective, dynamic):
    codecs = [codec for codec in CODECS if collective == "auto" or not isinstance(codec, PowerSGD)]

    def run(rank: int) -> list[str]:
        differing = []
        for codec in codecs:
            options = {"collective": collective, "dynamic": dynamic}
            expected = run_steps(rank, codec, **options, inline=False)
            ours = run_steps(rank, codec, **options, inline=True)
            same = len(expected[0]) == len(ours[0]) == 1 + 4 * 3
            same &= all(map(functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True), expected[0], ours[0]))
            same &= expected[1].keys() == ours[1].keys()
            same &= all(torch.equal(vector, ours[1][name]) for name, vector in expected[1].items())
            # flags travel as bytes there, not as bits
            same &= expected[2][:-1] == ours[2][:-1] and (dynamic or expected[2] == ours[2])
            if not same:
                differing.append(repr(codec))
            if isinstance(codec, Sign):
                assert ours[2][3] == "c"
                assert ours[1]
                assert all(bool(vector.isfinite().all()) for vector in ours[1].values())
        return differing

    assert run_ranks(run, 2) == [[], []]


@pytest.mark.slow
def test_under_ddp_identity_is_ddp_and_a_codec_is_the_thread(ddp_imported):
    for codec, other in ((Identity(), {"codec": None}), (Sign(), {"codec": Sign()})):
        expected = run_ranks(functools.partial(train, **other), 2)
        ours = run_ranks(functools.partial(train, codec=codec, inline=True), 2)
        assert torch.equal(expected[0][0], ours[0][0])
        assert torch.equal(ours[0][0], ours[1][0])
        assert ours[0][1] > 12, "several buckets"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["encode", "decode"])
def test_all_ranks_learn_of_a_failure_at_the_end_of_the_step(where):
    def run(rank: int) -> tuple[str, str]:
        codec = Fragile(where)
        engine = CommEngine(codec, collective="chunked", segment=2048, inline=True)
        reduce(engine, rank, 0)
        engine.commit()
        before = kept(engine)
        codec.armed = rank == 1
        for _ in range(2):  # two buckets: the first failure keeps no rank from the second
            reduce(engine, rank, 1)
        with pytest.raises(RankError) as first:
            engine.commit()
        assert all(torch.equal(vector, before[name]) for name, vector in kept(engine).items())
        with pytest.raises(RankError) as second:
            reduce(engine, rank, 2)
        engine.close()
        return str(first.value), str(second.value)

    for first, second in run_ranks(run, 3):
        text = "ArithmeticError: the codec of this rank broke"
        assert first.count(text) == second.count(text) == 1
        assert "rank 1" in first
        assert "rank 0" not in first


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["chunked", "gather"])
def test_nothing_is_asked_of_the_device_before_the_end_of_the_step(monkeypatch, collective):
    """Backward would wait for the network: every such question is a value that goes to the host."""
    asked: list[str] = []

    def count(name: str) -> None:
        plain = getattr(Tensor, name)

        def ask(self: Tensor) -> object:
            # which asks tensors of the CPU alone
            if sys._getframe(1).f_code.co_name != "mark_bad_blocks":
                asked.append(name)
            return plain(self)

        monkeypatch.setattr(Tensor, name, ask)

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        count(name)

    def run(rank: int) -> list[int]:
        numbers = []
        for codec in (FP16(), FP8(), Int8(), QSGD(4), TernGrad(), Sign(), Natural()):
            engine = CommEngine(codec, collective=collective, segment=2048, inline=True)
            for step in range(2):
                asked.clear()
                reduce(engine, rank, step)
                numbers.append(len(asked))
                engine.commit()
                assert len(asked) > numbers[-1]
            engine.close()
        return numbers

    assert run_ranks(run, 2) == [[0] * 14] * 2


def test_it_is_for_nccl_alone(monkeypatch):
    def run(rank: int) -> list[bool]:
        made = [CommEngine(Int8())]
        monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
        made.append(CommEngine(Int8()))
        return [engine.inline for engine in made]

    assert run_ranks(run, 1) == [[False, True]]


def test_verdicts_that_come_later():
    called = []
    later = Verdicts(later=True)
    huge = torch.full((9,), 3e38)  # whose sum is not finite
    for number, x in enumerate((torch.ones(3), torch.tensor([1.0, math.inf]), huge, torch.tensor([math.nan]))):
        assert not later.bad(x, functools.partial(called.append, number))
        assert Verdicts().bad(x, lambda: None) == (number in (1, 3))
    assert called == []
    later.settle()
    later.settle()
    assert called == [1, 3]
