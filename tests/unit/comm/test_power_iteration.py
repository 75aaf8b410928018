"""PowerSGD between real processes."""

from __future__ import annotations

import hashlib
import math
import time

import pytest
import torch
from torch import Tensor

from robustdist import UsageError
from robustdist.comm import Identity, PowerSGD, Sign
from robustdist.comm.cost import dense_bytes
from robustdist.comm.engine import CommEngine
from robustdist.core.testing import run_ranks
from tests.unit.comm.test_engine import gradients, reduce

pytestmark = pytest.mark.slow

#: A matrix, a kernel, a large and a small vector, a matrix with nothing to gain, a small matrix.
SHAPES = {"w": (90, 70), "kernel": (16, 8, 3, 3), "vector": (3000,), "bias": (90,), "thin": (2000, 1), "tiny": (20, 30)}
MATRICES = {"w": (90, 70), "kernel": (16, 72)}


def by_name(flat: Tensor, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def gram_schmidt(rows: Tensor) -> Tensor:
    basis: list[Tensor] = []
    for row in rows:
        rest = row - sum((row @ other) * other for other in basis) if basis else row
        basis.append(rest / rest.norm())
    return torch.stack(basis)


def _mean(world_size: int, step: int) -> Tensor:
    return sum(gradients(rank, step, SHAPES)[1].double() for rank in range(world_size)) / world_size


def naive(world_size: int, steps: int, rank: int) -> list[Tensor]:
    """The method in one process, in float64, with all of the ranks' residuals."""
    cpu = torch.device("cpu")
    start = {name: PowerSGD(rank).start(name, rank, n, cpu).double() for name, (_, n) in MATRICES.items()}
    residuals = {name: [torch.zeros(shape).double()] * world_size for name, shape in MATRICES.items()}
    results = []
    for step in range(steps):
        mean = by_name(_mean(world_size, step))
        for name, shape in MATRICES.items():
            own = [by_name(gradients(i, step, SHAPES)[1].double())[name].reshape(shape) for i in range(world_size)]
            matrices = [grad + error for grad, error in zip(own, residuals[name], strict=True)]
            p = gram_schmidt(sum(start[name] @ matrix.T for matrix in matrices) / world_size)
            start[name] = sum(p @ matrix for matrix in matrices) / world_size
            product = p.T @ start[name]
            residuals[name] = [matrix - product for matrix in matrices]
            mean[name].copy_(product.view(SHAPES[name]))
        results.append(torch.cat([part.reshape(-1) for part in mean.values()]))
    return results


@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (3, 4)])
def test_it_is_the_method_of_one_process_that_has_all_gradients(world_size, rank):
    def run(process: int) -> tuple[list[Tensor], int]:
        engine, results = CommEngine(PowerSGD(rank)), []
        for step in range(8):
            results.append(reduce(engine, process, step, SHAPES).clone())
            engine.commit()
        engine.close()
        return results, engine.stats.bytes_sent

    ranks = run_ranks(run, world_size)
    for step, expected in enumerate(naive(world_size, 8, rank)):
        assert all(torch.equal(results[step], ranks[0][0][step]) for results, _ in ranks)
        assert torch.allclose(ranks[0][0][step].double(), expected, atol=2e-4)
    factors = rank * sum(rows + columns for rows, columns in MATRICES.values())
    whole = 3000 + 90 + 2000 + 600 + 1
    expected_bytes = 8 * dense_bytes(factors + whole, world_size)
    assert sum(sent for _, sent in ranks) / world_size == pytest.approx(expected_bytes, abs=8 * 4)


def test_many_buckets_with_sleepy_ranks_keep_all_replicas_alike_and_lose_nothing():
    """Two hundred steps of 1 MiB buckets: where follow-up collectives start in callbacks, this hangs or aborts."""
    steps, buckets = 200, 3

    def run(process: int) -> tuple[str, float]:
        engine, draw = CommEngine(PowerSGD(2)), torch.Generator().manual_seed(process)
        bases = torch.randn(buckets, 512, 512, generator=draw)
        digest = hashlib.sha256()
        decoded, given = (torch.zeros(buckets, 512, 512) for _ in range(2))
        for step in range(steps):
            futures = []
            for bucket in range(buckets):
                if float(torch.rand((), generator=draw)) < 0.1:
                    time.sleep(0.003)
                buffer = bases[bucket].roll(step, 0).mul_(math.cos(step + process))
                given[bucket] += buffer
                futures.append(engine.submit({f"{bucket}.weight": buffer}, buffer.view(-1), step=step))
            for bucket, future in enumerate(futures):
                result = future.wait().view(512, 512)
                decoded[bucket] += result
                digest.update(result[::37].numpy().tobytes())
            engine.commit()
        kept = torch.stack([engine.memory.get(f"{bucket}.weight").view(512, 512) for bucket in range(buckets)])
        # the mean of what the ranks gave and do not keep is what all have received
        other, total = CommEngine(Identity()), (given - kept).view(-1)
        other.submit({"sum": total}, total, step=0).wait()
        engine.close()
        other.close()
        return digest.hexdigest(), float((total - decoded.view(-1)).abs().max())

    ranks = run_ranks(run, 2, timeout=100)
    assert ranks[0][0] == ranks[1][0]
    assert max(error for _, error in ranks) < 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_seen_by_all_and_kept_by_none(bad):
    def run(process: int) -> tuple[bool, bool, bool, Tensor]:
        engine = CommEngine(PowerSGD(2))
        reduce(engine, process, 0, SHAPES)
        engine.commit()
        before = (engine.memory.state_dict()["residual"]["w"], engine.codec.state_dict()["start"]["w"])
        grads, buffer = gradients(process, 1, SHAPES)
        if process == 1:
            grads["w"][3, 4] = bad
        engine.submit(grads, buffer, step=1).wait()
        seen, others = not grads["w"].isfinite().any(), grads["kernel"].isfinite().all()
        after = (engine.memory.state_dict()["residual"]["w"], engine.codec.state_dict()["start"]["w"])
        engine.commit()
        same = all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
        result = reduce(engine, process, 2, SHAPES)
        engine.close()
        return bool(seen), bool(others), same, result

    ranks = run_ranks(run, 3)
    assert all(row[:3] == (True, True, True) for row in ranks)
    assert ranks[0][3].isfinite().all()
    assert all(torch.equal(ranks[0][3], row[3]) for row in ranks)


def test_zeros_give_zeros_and_a_skipped_step_is_as_if_it_had_not_been():
    def run(process: int) -> tuple[bool, bool, bool]:
        silent, skipped, plain = (CommEngine(PowerSGD(2)) for _ in range(3))
        grads, buffer = gradients(process, 0, SHAPES)
        zeros = not silent.submit(grads, buffer.zero_(), step=0).wait().any()
        silent.commit()
        first = reduce(silent, process, 1, SHAPES)
        for engine in (skipped, plain):
            reduce(engine, process, 0, SHAPES)
            engine.commit()
        reduce(skipped, process, 7, SHAPES)
        skipped.rollback()
        same = torch.equal(reduce(skipped, process, 1, SHAPES), reduce(plain, process, 1, SHAPES))
        fresh = CommEngine(PowerSGD(2))
        unharmed = torch.equal(first, reduce(fresh, process, 1, SHAPES))
        for engine in (silent, skipped, plain, fresh):
            engine.close()
        return zeros, same, unharmed

    assert run_ranks(run, 2) == [(True, True, True)] * 2


def test_the_state_of_codec_and_memory_goes_on_exactly():
    def run(process: int) -> bool:
        engine = CommEngine(PowerSGD(2))
        for step in range(3):
            reduce(engine, process, step, SHAPES)
            engine.commit()
        codec = PowerSGD(2)
        codec.load_state_dict(engine.codec.state_dict())
        resumed = CommEngine(codec)
        resumed.memory.load_state_dict(engine.memory.state_dict())
        same = torch.equal(reduce(engine, process, 3, SHAPES), reduce(resumed, process, 3, SHAPES))
        starts = set(engine.codec.state_dict()["start"])
        engine.close()
        resumed.close()
        return same and starts == set(MATRICES)

    assert run_ranks(run, 2) == [True, True]


def test_what_is_sent_whole_after_a_change_takes_its_residual_along():
    """From Sign, which has residuals for all large parameters, to factors, which have none for vectors, and back."""
    plan = [Sign(), Sign(), PowerSGD(2), PowerSGD(40), Sign()]

    def run(process: int) -> tuple[Tensor, Tensor, bool]:
        engine = CommEngine(plan[0], segment=2048, collective="auto")
        total = torch.zeros(sum(map(math.prod, SHAPES.values())), dtype=torch.float64)
        emptied = []
        for step, codec in enumerate(plan):
            if step and codec is not plan[step - 1]:
                engine.change(codec)
            total += reduce(engine, process, step, SHAPES)
            engine.commit()
            if isinstance(codec, PowerSGD):
                emptied += [not engine.memory.get("vector").any(), not engine.owned.state_dict()["residual"]]
        kept = torch.zeros_like(total)
        places = {name: part.view(-1) for name, part in by_name(kept).items()}
        for name, error in engine.memory.state_dict()["residual"].items():
            places[name] += error.double() / 3
        for key, error in engine.owned.state_dict()["residual"].items():
            name, offset = key.split("@")
            places[name][int(offset) :][: len(error)] += error.double()
        engine.close()
        return total, kept, all(emptied)

    ranks = run_ranks(run, 3)
    given = sum(_mean(3, step) for step in range(len(plan)))
    assert torch.allclose(ranks[0][0] + sum(kept for _, kept, _ in ranks), given, atol=1e-4)
    assert all(emptied for *_, emptied in ranks)


def test_factors_are_added_by_an_all_reduce_and_by_nothing_else():
    def run(process: int) -> bool:
        CommEngine(PowerSGD(), collective="native").close()
        with pytest.raises(UsageError, match=r"collective='gather' cannot add the factors.*use 'auto'"):
            CommEngine(PowerSGD(), collective="gather")
        return True

    assert run_ranks(run, 1) == [True]
