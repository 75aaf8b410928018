"""Codecs in parts, and gradients as the ends of an exchange: the same as whole tensors, without their memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from robustdist.comm import (
    BF16,
    DGC,
    EF21,
    FP8,
    QSGD,
    ErrorFeedback,
    Identity,
    Int8,
    Natural,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from robustdist.comm.bucket_ends import make_ends
from robustdist.comm.collectives import Chunked, Gather, run_pipelined
from robustdist.comm.engine import CommEngine
from robustdist.comm.layout import Layout
from robustdist.comm.owner import OwnerResiduals
from robustdist.comm.scratch import TILE, pool
from robustdist.core.testing import run_ranks

CODECS = [
    Identity(), BF16(), FP8(), Int8(), QSGD(4), QSGD(3), TernGrad(), Sign(), Natural(), TopK(0.05), RandomK(0.1),
    DGC(0.05), EF21(Int8()),
]  # fmt: skip
CPU = torch.device("cpu")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("numel", [1, 3000, TILE + 700])
def test_parts_are_the_whole(codec, numel):
    payloads = []
    for rank in (0, 1, 2):
        x = noise(numel, seed=rank)
        whole = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
        codec.encode(x, whole, rank=rank, step=5, name="a")
        parts, sent, seen = torch.full_like(whole, 9), torch.zeros(numel), []

        def load(begin: int, length: int, x: Tensor = x, seen: list[int] = seen) -> Tensor:
            assert begin == sum(seen), "parts come in order"
            seen.append(length)
            return x[begin : begin + length].clone()

        def keep(begin: int, value: Tensor, decoded: Tensor, x: Tensor = x, sent: Tensor = sent) -> None:
            assert torch.equal(value, x[begin : begin + len(value)])
            sent[begin : begin + len(value)] = decoded

        codec.encode_parts(numel, load, parts, keep, rank=rank, step=5, name="a")
        assert torch.equal(parts, whole)
        expected = torch.empty(numel)
        codec.decode(whole, expected)
        assert torch.equal(sent, expected)
        payloads.append(whole)
    total, expected = torch.full((numel,), 7.0), torch.zeros(numel)
    codec.decode_parts(numel, payloads, lambda begin, part: total[begin : begin + len(part)].copy_(part), alpha=0.25)
    for data in payloads:
        codec.decode(data, expected, alpha=0.25)
    assert torch.equal(total, expected)


def test_gradients_are_read_fed_back_and_overwritten_by_name():
    """Re-derived with whole tensors: v = g + S e, e' = (v - C(v)) / S; nothing changes where a value is infinite."""
    codec, scale = Int8(block=64), 8.0
    shapes = {"a": (37, 41), "image": (2, 3, 20, 20), "tail": (64,)}
    layout = Layout(list(shapes.items()), block=64, small=8)
    memory, residuals = ErrorFeedback(), {name: torch.zeros(math.prod(shape)) for name, shape in shapes.items()}
    for step in range(4):
        grads = {name: noise(*shape, seed=10 * step + place) for place, (name, shape) in enumerate(shapes.items())}
        grads["image"] = grads["image"].to(memory_format=torch.channels_last)
        if step == 2:
            grads["a"][5, 5] = math.inf
        expected = {}
        for name, grad in grads.items():
            v = grad.flatten() + scale * residuals[name]
            sent = codec.decompress(codec.compress(v))
            expected[name] = (0.5 * sent).view(grad.shape)
            if sent.isfinite().all():
                residuals[name] = (v - sent) / scale
        data = torch.empty(codec.payload_bytes(layout.total), dtype=torch.uint8)
        ends = make_ends(layout, grads, codec, memory, scale=scale)
        for begin, end in ((0, layout.total),):
            codec.encode_parts(end - begin, ends.load, data, ends.keep)
            codec.decode_parts(end - begin, [data], ends.store, alpha=0.5)
        assert ends.finish() == (["a"] if step == 2 else [])
        memory.commit()
        for name in shapes:
            torch.testing.assert_close(grads[name], expected[name], equal_nan=True)
            torch.testing.assert_close(memory.get(name), residuals[name])


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["gather", "chunked"])
def test_every_parameter_has_blocks_of_its_own_in_any_segments(collective):
    """Each is what the codec makes of it alone: gaps and neighbours count in no scale, cuts are at blocks."""
    shapes = {"a": (1025,), "b": (700,), "c": (3, 683), "d": (512,)}
    codecs = [Sign(), Sign(block=384), TernGrad(clip=1.5, stochastic=False), Int8(block=96)]

    def grads(rank: int) -> dict[str, Tensor]:
        return {"a": torch.full((1025,), 3.0), **{name: noise(*shapes[name], seed=rank) for name in "bcd"}}

    def run(rank: int) -> None:
        for codec in codecs:
            engine = CommEngine(codec, error_feedback=False, collective=collective, small=8, segment=1000)
            buffer = torch.cat([grad.flatten() for grad in grads(rank).values()])
            parts = torch.split(buffer, [math.prod(shape) for shape in shapes.values()])
            own = dict(zip(shapes, parts, strict=True))
            engine.submit(own, buffer, step=0).wait()
            engine.close()
            for name in shapes:
                sent = [codec.decompress(codec.compress(grads(other)[name].flatten())) for other in range(3)]
                mean = sum(sent) / 3
                expected = codec.decompress(codec.compress(mean)) if collective == "chunked" else mean
                torch.testing.assert_close(own[name], expected, msg=lambda text, c=codec, n=name: f"{c} {n}: {text}")

    run_ranks(run, 3)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Int8(), QSGD(4), QSGD(4, stochastic=False), Sign(), TernGrad(), BF16(), TopK()])
@pytest.mark.parametrize("kind", [Gather, Chunked])
def test_nothing_larger_than_a_tile_is_allocated_once_warm(codec, kind):
    shapes = [(f"layer{place}", (600, 700)) for place in range(3)]
    segment = 4 * TILE

    def run(rank: int) -> tuple[int, int]:
        layout = Layout(shapes, block=codec.block)
        memory = codec.make_memory()
        owned = OwnerResiduals()

        def step(number: int) -> Results:
            grads = {name: noise(*shape, seed=10 * number + rank) for name, shape in shapes}
            with torch.no_grad(), Results() as results:
                reduce(grads)
            return results

        def reduce(grads: dict[str, Tensor]) -> None:
            ends = make_ends(layout, grads, codec, memory)
            exchanges = []
            for begin in range(0, layout.total, segment):
                what = (ends, begin, min(segment, layout.total - begin), codec, dist.group.WORLD)
                options = {"owner": owned.view(layout, 1.0)} if kind is Chunked else {}
                exchanges.append(kind(*what, **options))
            run_pipelined(exchanges)
            assert [exchange.error for exchange in exchanges] == [None] * len(exchanges)
            ends.finish()
            memory.commit()
            owned.commit()

        results = [step(number) for number in range(4)]  # the residuals take turns between two vectors
        return results[-1].largest, results[-1].calls

    for largest, calls in run_ranks(run, 2):
        assert calls > 100
        assert largest <= 4 * TILE


class Results(TorchDispatchMode):
    """Bytes of the largest new storage that an operation returns while this is open."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        given = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def test_buffers_of_bytes_are_used_again_whatever_their_size_in_a_class():
    first, second = pool.take(1000, CPU), pool.take(1000, CPU)
    assert first.data_ptr() != second.data_ptr(), "both are in use"
    pool.give(first)
    third = pool.take(700, CPU)
    assert third.data_ptr() == first.data_ptr()
    assert len(third) == 700
    pool.give(second)
    pool.give(third)
    assert pool.take(2000, CPU).data_ptr() not in (first.data_ptr(), second.data_ptr())
