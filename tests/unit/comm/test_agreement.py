"""Sets of parameters that change from step to step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robustdist.comm import DGC, EF21, FP16, Compressor, Identity, Int8, PowerSGD, Sign, TopK, reduction
from robustdist.comm.agreement import has_entries, used_anywhere
from robustdist.comm.engine import CommEngine
from robustdist.core.testing import run_ranks
from tests.unit.comm.test_engine import SHAPES, gradients

#: Who has no gradient, step by step: a rank, or all of them.
EVERYWHERE = (0, 1, 2)
PLAN: list[dict[str, tuple[int, ...]]] = [
    {},
    {"a": EVERYWHERE},
    {"a": EVERYWHERE, "bias": EVERYWHERE},
    {"a": (1,), "c": EVERYWHERE},
    {"a": EVERYWHERE, "d": (0, 2)},
    dict.fromkeys(SHAPES, EVERYWHERE),
    {},
    {"a": EVERYWHERE},
    {"b": (0,)},
]


def planned(rank: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
    grads, buffer = gradients(rank, step)
    for name, ranks in PLAN[step].items():
        if rank in ranks:
            grads[name].zero_()
    return grads, buffer


def test_bits_say_what_has_entries_on_any_rank():
    late = torch.zeros(300_000)
    late[299_999] = 1e-40
    cases = [
        (torch.zeros(3, 4), False), (torch.tensor(0.0), False), (torch.tensor([0.0, -0.0]), False), (late, True),
        (torch.tensor([0.0, math.nan]), True), (torch.zeros(0), False), (torch.ones(5, 7).T, True),
        *[(torch.zeros(1), False)] * 5, (torch.tensor([[0.0], [2.0]]), True),
    ]  # fmt: skip
    assert [has_entries(x) for x, _ in cases] == [has for _, has in cases]
    grads = {str(place): x for place, (x, _) in enumerate(cases)}
    own, used = used_anywhere(grads, lambda bits: None)
    assert list(used) == [str(place) for place, (_, has) in enumerate(cases) if has]
    assert used["3"] is late
    assert len(own) == 2
    other, everything = used_anywhere(grads, lambda bits: bits.fill_(255))
    assert list(everything) == list(grads)
    assert other != own


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["chunked", "gather"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_nothing_is_lost_of_what_ddp_throws_away(collective, dynamic):
    """What comes out for a parameter that no rank has used is thrown away: by agreement there is nothing in it."""

    def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], bool]:
        engine = CommEngine(Sign(), collective=collective, segment=2048, dynamic=dynamic)
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        frozen = True
        for step, unused in enumerate(PLAN):
            silent = [name for name, ranks in unused.items() if ranks == EVERYWHERE]
            before = [memory.state_dict()["residual"] for memory in engine._memories()]
            grads, buffer = planned(rank, step)
            engine.submit(grads, buffer, step=step).wait()
            engine.commit()
            for name, grad in grads.items():
                if name in silent:
                    frozen &= not grad.any()
                else:
                    total[name] += grad
            for memory, old in zip(engine._memories(), before, strict=True):
                new = memory.state_dict()["residual"]
                keys = [key for key in {*old, *new} if key.split("@")[0] in silent]
                frozen &= all(key in old and key in new and torch.equal(old[key], new[key]) for key in keys)
        owned = engine.owned.state_dict()["residual"]
        engine.close()
        return total, engine.memory.state_dict()["residual"], owned, frozen

    ranks = run_ranks(run, 3)
    equal = []
    for name, shape in SHAPES.items():
        given = sum(planned(rank, step)[0][name].double() / 3 for step in range(len(PLAN)) for rank in range(3))
        kept = torch.zeros(shape, dtype=torch.float64).view(-1)
        for _, workers, owners, _ in ranks:
            if name in workers:
                kept += workers[name].double() / 3
            for key, error in owners.items():
                if key.split("@")[0] == name:
                    kept[int(key.split("@")[1]) :][: len(error)] += error.double()
        equal.append(torch.allclose(ranks[0][0][name].view(-1) + kept, given.view(-1), atol=1e-4))
    assert all(equal) == dynamic
    assert {frozen for *_, frozen in ranks} == {dynamic}


@pytest.mark.slow
def test_all_codecs_agree_and_send_only_what_is_used():
    codecs: list[Compressor] = [Identity(), FP16(), Int8(), Sign(), TopK(0.1), DGC(0.1), EF21(Int8()), PowerSGD(2)]

    def run(rank: int) -> list[tuple[Tensor, list[int], bool]]:
        rows = []
        for codec in codecs:
            engine = CommEngine(codec, segment=2048, dynamic=True)
            results, sent, right = [], [], True
            for step, unused in enumerate(PLAN):
                grads, buffer = planned(rank, step)
                results.append(engine.submit(grads, buffer, step=step, note=(float(rank),)).wait().clone())
                sent.append(engine.stats.bytes_sent - sum(sent))
                right &= not any(grads[name].any() for name, ranks in unused.items() if ranks == EVERYWHERE)
                right &= abs(engine.note[0] - 1) < 1e-6
                engine.commit()
            engine.close()
            rows.append((torch.stack(results), sent, right))
        return rows

    ranks = run_ranks(run, 3)
    means = torch.stack([sum(planned(rank, step)[1] for rank in range(3)) / 3 for step in range(len(PLAN))])
    for (first, sent, right), *others in zip(*ranks, strict=True):
        assert right
        assert all(torch.equal(first, other) for other, _, _ in others)
        assert sent[5] < 20 < sent[1] < sent[0], "bits, note and count of failures alone; no a; all"
    assert torch.allclose(ranks[0][0][0], means, atol=1e-6)


@pytest.mark.slow
def test_a_set_that_comes_back_is_laid_out_once(monkeypatch):
    made = []
    plain = reduction.Layout
    monkeypatch.setattr(reduction, "Layout", lambda *args, **options: made.append(1) or plain(*args, **options))

    def run(rank: int) -> int:
        engine = CommEngine(Int8(), dynamic=True)
        for step in range(12):
            grads, buffer = gradients(rank, step)
            for name in ((), ("a",), ("c", "d"))[step % 3]:
                grads[name].zero_()
            engine.submit(grads, buffer, step=step).wait()
        engine.close()
        return len(made)

    assert run_ranks(run, 2) == [4, 4], "all at first, for the buffers, and the three sets"
