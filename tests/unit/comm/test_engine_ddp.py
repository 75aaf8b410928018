"""The engine as the hook of DDP."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from torch import Tensor, nn

from robustdist.comm import (
    EF21,
    QSGD,
    Compressor,
    Identity,
    Int8,
    Sign,
    TopK,
)
from robustdist.comm.engine import CommEngine
from robustdist.core.testing import run_ranks

pytestmark = pytest.mark.slow


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
