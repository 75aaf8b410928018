"""Nothing of the gradients is lost when a run goes on with another number of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from robustdist import UsageError
from robustdist.comm import DGC, EF21, QSGD, MomentumReducer, PowerSGD, Sign, TopK
from robustdist.comm.engine import CommEngine
from robustdist.comm.residual_state import check_residuals, load_residuals, map_residuals, save_residuals
from robustdist.core.testing import run_ranks

SHAPES = {"a": (40, 33), "b": (7, 3), "c": (1201,)}
SIZES = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def stage(rank, codec, options, first, steps, state, mode):
    """Run some steps; return what was delivered, the mean of what was put in, and the state."""
    engine = CommEngine(codec, small=64, **options)
    if state is not None:
        load_residuals(engine, state, rank)
    world_size = engine.world_size
    delivered = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(first, first + steps):
        for other in range(world_size):
            for name, grad in gradients(other, step).items():
                expected[name] += grad.float().double() / world_size
        own = {name: grad.float() for name, grad in gradients(rank, step).items()}
        # the buckets are cut anew after the first step, as DDP does
        cuts = [list(SHAPES)] if step == first else [["c", "b"], ["a"]]
        for names in cuts:
            buffer = torch.cat([own[name].flatten() for name in names])
            parts = dict(zip(names, buffer.split([SIZES[name] for name in names]), strict=True))
            engine.submit({name: part.view(SHAPES[name]) for name, part in parts.items()}, buffer, step=step).wait()
            for name, part in parts.items():
                delivered[name] += part.view(SHAPES[name]).double()
        engine.commit()
    state = save_residuals(engine, mode, SIZES)
    engine.close()
    return delivered, expected, state


@pytest.mark.parametrize("codec", [Sign(block=64), TopK(0.05), QSGD(bits=2, block=64)], ids=repr)
@pytest.mark.parametrize("collective", ["chunked", "gather"])
def test_delivered_and_kept_is_what_was_put_in_over_4_then_2_then_3_ranks(codec, collective):
    delivered = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    state = None
    for place, world_size in enumerate([4, 2, 3]):
        arguments = (codec, {"collective": collective}, 10 * place, 4, state, "reduced")
        results = run_ranks(lambda rank, *args: stage(rank, *args), world_size, *arguments)
        state = results[0][2]
        for other in results[1:]:
            assert all(torch.equal(results[0][0][name], other[0][name]) for name in SHAPES)
        for name in SHAPES:
            delivered[name] += results[0][0][name]
            expected[name] += results[0][1][name]
    kept = state["memory"]["residual"]
    assert kept.keys() == {"a", "c"}
    for name in SHAPES:
        left = kept[name].double().view(SHAPES[name]) if name in kept else 0.0
        assert torch.allclose(delivered[name] + left, expected[name], atol=2e-4)
        if name in kept:
            assert not torch.allclose(delivered[name], expected[name], atol=0.1)


@pytest.mark.parametrize("codec", [DGC(0.05), EF21(TopK(0.05))], ids=repr)
def test_memories_of_their_own_go_on_alike_on_all_ranks(codec):
    state = run_ranks(lambda rank: stage(rank, codec, {}, 0, 4, None, "reduced"), 3)[0][2]
    results = run_ranks(lambda rank: stage(rank, codec, {}, 10, 4, state, "reduced"), 2)
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in SHAPES)
    for vectors in results[0][2]["memory"].values():
        assert all(bool(torch.isfinite(vector).all()) for vector in vectors.values())


def test_ef21_tracks_the_mean_of_the_ranks_after_another_number_of_them():
    """The aggregate is the mean of the estimates: lost, it would never be right again."""
    codec = EF21(TopK(0.5))

    def constant(rank, state):
        engine = CommEngine(codec, small=64)
        if state is not None:
            load_residuals(engine, state, rank)
        for step in range(12):
            buffer = torch.arange(1320.0) * (rank + 1) / 1320
            engine.submit({"a": buffer.view(40, 33)}, buffer, step=step).wait()
            engine.commit()
        state = save_residuals(engine, "reduced", SIZES)
        engine.close()
        return buffer, state

    state = run_ranks(constant, 3, None)[0][1]
    (ours, _), _ = run_ranks(constant, 2, state)
    assert torch.allclose(ours, torch.arange(1320.0) * 1.5 / 1320, atol=1e-4)


def test_reset_keeps_nothing():
    state = run_ranks(lambda rank: stage(rank, Sign(), {}, 0, 2, None, "reset"), 2)[0][2]
    assert state == {"mode": "reset", "world_size": 2}


# --- changed by a function


def step(engine, rank, number, shapes):
    buffer = torch.randn(
        sum(map(math.prod, shapes.values())), generator=torch.Generator().manual_seed(10 * number + rank)
    )
    parts = buffer.split([math.prod(shape) for shape in shapes.values()])
    grads = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    engine.submit(grads, buffer, step=number).wait()
    engine.commit()
    return grads


def halves(name, x):
    return None if name == "c" else x[:20]  # b has fewer rows


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Sign(block=64), DGC(0.05), EF21(TopK(0.05)), PowerSGD(2)], ids=repr)
def test_half_the_rows_of_a_parameter_keep_what_was_kept_of_them(codec):
    def run(rank):
        engine = CommEngine(codec, small=64, collective="auto" if isinstance(codec, PowerSGD) else "chunked")
        for number in range(3):
            step(engine, rank, number, SHAPES)
        before = save_residuals(engine, "reduced", SIZES)
        calls = []
        new = map_residuals(engine, lambda name, x: calls.append((name, tuple(x.shape))) or halves(name, x), SHAPES)
        assert new["a"] == (20, 33)
        assert "c" not in new
        assert ("a", (40, 33)) in calls
        for slot, vectors in engine.memory.state_dict().items():
            assert "c" not in vectors
            assert torch.equal(vectors["a"].view(20, 33), before["memory"][slot]["a"].view(40, 33)[:20])
            assert vectors["a"].any()
        assert not (engine.owned and engine.owned.state_dict()["residual"])
        if isinstance(codec, PowerSGD):  # rows are not in Q
            assert torch.equal(engine.codec.state_dict()["start"]["a"], before["codec"]["start"]["a"])
        check_residuals(engine, {"a": 20 * 33, "b": 21, "c": 600})
        with pytest.raises(UsageError, match="a has 1320 elements, and what the compressor keeps of it has 660"):
            check_residuals(engine, SIZES)
        means = step(engine, rank, 3, {"a": (20, 33), "b": (7, 3), "c": (600,)})
        check_residuals(engine, {"b": 21, "c": 600})
        assert engine.memory.get("a") is None
        engine.close()
        return means

    first, second = run_ranks(run, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_columns_are_cut_out_of_the_factors():
    def run(rank):
        engine = CommEngine(PowerSGD(2), small=64)
        step(engine, rank, 0, SHAPES)
        old = engine.codec.state_dict()["start"]["a"]
        map_residuals(engine, lambda name, x: x[:, ::3] if name == "a" else None, SHAPES)
        new = engine.codec.state_dict()["start"]
        engine.close()
        return new.keys() == {"a"} and torch.equal(new["a"], old[:, ::3])

    assert run_ranks(run, 2) == [True, True]


def test_a_function_that_treats_vectors_of_a_parameter_differently_is_refused():
    def run(rank):
        engine = CommEngine(EF21(TopK(0.05)), small=64)
        step(engine, rank, 0, SHAPES)
        rows = iter(range(1, 40))
        with pytest.raises(UsageError, match="the function gave a several shapes"):
            map_residuals(engine, lambda name, x: x[: next(rows)], SHAPES)
        engine.close()
        return True

    assert run_ranks(run, 2) == [True, True]


def test_a_residual_of_a_momentum_is_padded_as_it_is_sent():
    reducer = run_ranks(lambda rank: [MomentumReducer(Sign(block=64), small=8).padded(torch.ones(5, 13))], 1)[0][0]
    assert torch.equal(reducer, torch.cat([torch.ones(65), torch.zeros(63)]))
