"""Steps of the engine whose gradients are averaged as they are, before those that go through the codec."""

from __future__ import annotations

import pytest
import torch

from robustdist.comm import DGC, Compressor, Sign
from robustdist.comm.cost import dense_bytes
from robustdist.comm.engine import CommEngine
from robustdist.core.testing import run_ranks
from tests.unit.comm.test_engine import NUMEL, exact, gradients

pytestmark = pytest.mark.slow

STEPS = 3


def means(rank: int, codec: Compressor, steps: range, **options: object) -> list[tuple[torch.Tensor, float]]:
    """Means of some steps, and the bytes that were sent up to each."""
    engine, results = CommEngine(codec, **options), []
    for step in steps:
        mean = engine.submit(*gradients(rank, step), step=step).wait().clone()
        # two optimisers are two steps, whatever they step
        engine.commit({"a", "b"} if step % 2 else None)
        results.append((mean, engine.comm_stats()["bytes_sent"]))
    engine.close()
    return results


@pytest.mark.parametrize("inline", [False, True])
def test_first_exact_means_then_those_of_a_new_engine(inline):
    def both(rank):
        options = {"inline": inline, "collective": "chunked"}
        ours = means(rank, Sign(), range(6), warmup_steps=STEPS, **options)
        return ours, means(rank, Sign(), range(STEPS, 6), **options)

    for ours, fresh in run_ranks(both, 2):
        for step in range(STEPS):
            assert torch.equal(ours[step][0], exact(2, step).float())
            assert ours[step][1] == (step + 1) * dense_bytes(NUMEL, 2)
        for (mean, sent), (expected, expected_sent) in zip(ours[STEPS:], fresh, strict=True):
            assert torch.equal(mean, expected)
            assert sent == STEPS * dense_bytes(NUMEL, 2) + expected_sent


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_momentum_of_the_method_is_there_from_the_start(nesterov):
    """As in the optimiser that DGC takes the place of."""

    def train(rank):
        return means(rank, DGC(0.1, momentum=0.5, nesterov=nesterov), range(STEPS), warmup_steps=STEPS)

    for results in run_ranks(train, 2):
        momentum = torch.zeros(NUMEL, dtype=torch.float64)
        for step, (mean, _) in enumerate(results):
            grad = exact(2, step)
            momentum = 0.5 * (momentum + grad) if nesterov else 0.5 * momentum + grad
            assert torch.allclose(mean.double(), momentum + grad if nesterov else momentum, atol=1e-6)
