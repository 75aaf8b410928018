"""Nothing of the gradients is lost when a run goes on with another number of ranks."""

from __future__ import annotations

import pytest
import torch

from robustdist.comm import DGC, EF21, QSGD, Sign, TopK
from robustdist.comm.engine import CommEngine
from robustdist.comm.residual_state import load_residuals, save_residuals
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
        arguments = (codec, {"collective": collective}, 10 * place, 6, state, "reduced")
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
