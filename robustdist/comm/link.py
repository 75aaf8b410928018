"""Measuring a link and codecs, to choose among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.bucket_ends import make_ends
from robustdist.comm.cast import BF16, Identity
from robustdist.comm.collectives import all_gather
from robustdist.comm.cost import CodecSpeed, Link, dense_bytes, fastest, keeps_residuals
from robustdist.comm.layout import Layout
from robustdist.comm.quantize import QSGD, Int8
from robustdist.types import check_count

__all__ = ["CANDIDATES", "CodecSpeed", "Link", "measure_codec", "measure_link", "pick_compressor"]

#: Codecs that need no thought about accuracy in the engine, which gives the coarser two error feedback.
CANDIDATES: tuple[Compressor, ...] = (Identity(), BF16(), Int8(), QSGD(bits=4))

_LONG = 1024 * 1024
_PAYLOAD = 2 * 1024 * 1024
_CPU = torch.device("cpu")


def measure_link(group: dist.ProcessGroup | None = None, *, device: torch.device = _CPU, repeats: int = 3) -> Link:
    """Time all-reduces of 32 bytes and of 4 MiB, and a gathering of 2 MiB from each rank, several times each.

    All ranks of the group must call it, and all get the same numbers: the median of each rank, averaged over the ranks.

    Args:
        group: The group, by default that of all ranks.
        device: Where the tensors are.
        repeats: How many times the long ones are timed; the short one is three times as often.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return Link(0.0, math.inf)

    values, payload = torch.zeros(_LONG, device=device), torch.zeros(_PAYLOAD, dtype=torch.uint8, device=device)

    def reduce(part: Tensor) -> Tensor:
        dist.all_reduce(part, group=group)
        return part

    def gather() -> Tensor:
        everything = torch.empty(world_size * _PAYLOAD, dtype=torch.uint8, device=device)  # new ones, as in the engine
        all_gather(everything, payload, cast("dist.ProcessGroup", group or dist.group.WORLD)).wait()
        return everything

    check_count(repeats, "repeats")
    own = [
        median(_times(lambda: reduce(values[:8]), 3 * repeats)),
        median(_times(lambda: reduce(values), repeats)),
        median(_times(gather, repeats)),
    ]
    short, reduced, gathered = _averaged(own, group, device)

    def bandwidth(sent: float, seconds: float) -> float:
        # a short one is at times as slow as a long one, where a link is fast and the machine busy
        return sent / max(seconds - short, 0.1 * seconds)

    return Link(
        short, bandwidth(dense_bytes(_LONG, world_size), reduced), bandwidth((world_size - 1) * _PAYLOAD, gathered)
    )


def measure_codec(
    codec: Compressor, numel: int = _LONG, *, device: torch.device = _CPU, repeats: int = 5
) -> CodecSpeed:
    """Time what the engine does with a codec besides sending, in one thread; nothing for Identity.

    The shortest of ``repeats`` times counts: it is the codec that is measured, not what else the machine does.

    Args:
        codec: The codec; its contractive form is timed, as the engine uses it, with error feedback where it keeps one.
        numel: Elements to time it on, at most 1 Mi.
        device: Where they are.
        repeats: Number of times.
    """
    if isinstance(codec, Identity):
        return CodecSpeed()
    numel = max(1, min(numel, _LONG))
    codec = codec.contractive()
    memory = codec.make_memory() if codec.has_memory or keeps_residuals(codec) else None
    layout = Layout([("", (numel,))], block=codec.block, small=1)
    noise = torch.randn(layout.total, generator=torch.Generator().manual_seed(0)).to(device)
    grad, out = noise[:numel].clone(), torch.zeros_like(noise)
    payload = torch.empty(codec.payload_bytes(layout.total), dtype=torch.uint8, device=device)

    def send() -> Tensor:
        ends = make_ends(layout, {"": grad}, codec, memory)
        codec.encode_parts(layout.total, ends.load, payload, ends.keep if ends.keeps else None)
        ends.store(0, noise)
        ends.finish()
        if memory is not None:
            memory.commit()
        return payload

    def receive() -> Tensor:
        codec.decode(payload, out, alpha=0.5)
        return out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the thread of the engine
    try:
        return CodecSpeed(*(min(_times(work, check_count(repeats, "repeats"))) / numel for work in (send, receive)))
    finally:
        torch.set_num_threads(threads)


def pick_compressor(
    numel: int,
    link: Link,
    group: dist.ProcessGroup | None = None,
    *,
    candidates: Sequence[Compressor] = CANDIDATES,
    margin: float = 0.1,
    device: torch.device = _CPU,
) -> Compressor:
    """Measure the candidates and return the one to use on a link: the first, unless a later one is clearly faster.

    All ranks of the group must call it with the same arguments, and all get the same codec. The prediction lets nothing
    overlap, so it is in favour of the first candidate; see :func:`~robustdist.comm.cost.fastest`.

    Args:
        numel: Elements of all gradients together.
        link: From :func:`measure_link`.
        group: The group, by default that of all ranks.
        candidates: Codecs, the most exact one first.
        margin: Share by which a coarser codec has to be faster.
        device: Where the gradients are.
    """
    own = [measure_codec(codec, numel, device=device) for codec in candidates]
    means = _averaged([seconds for speed in own for seconds in (speed.send, speed.receive)], group, device)
    speeds = [CodecSpeed(*pair) for pair in zip(means[::2], means[1::2], strict=True)]
    return fastest(candidates, speeds, numel, dist.get_world_size(group), link, margin=margin)


def _times(work: Callable[[], Tensor], repeats: int) -> list[float]:
    """Seconds of each call but a first one; reading a value of the result waits for a device."""
    times = []
    for _ in range(repeats + 1):
        begin = perf_counter()
        work()[0].item()
        times.append(perf_counter() - begin)
    return times[1:]


def _averaged(values: Sequence[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, group=group)
    averages: list[float] = (shared / dist.get_world_size(group)).tolist()
    return averages
