"""What a collective sends and how long it takes, by formula; which collective and which codec is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from robustdist.comm.base import Compressor
from robustdist.comm.cast import Identity
from robustdist.comm.collectives import aligned, chunks
from robustdist.comm.ef21 import EF21
from robustdist.comm.sparsify import TopK
from robustdist.errors import UsageError

__all__ = [
    "COLLECTIVES",
    "CodecSpeed",
    "Collective",
    "Link",
    "choose",
    "dense_bytes",
    "fastest",
    "keeps_residuals",
    "predict_seconds",
    "segment_length",
    "sent_bytes",
]

Collective: TypeAlias = Literal["chunked", "gather", "native"]
COLLECTIVES: tuple[Collective, ...] = ("chunked", "gather", "native")


@dataclass(frozen=True)
class Link:
    """What collectives take between the ranks of a group.

    Attributes:
        latency: Seconds of a collective of a few bytes.
        bandwidth: Bytes per second that a rank sends in a long all-reduce of float32, the summation included.
        payload_bandwidth: The same for payloads, which are gathered and not summed; by default as above. On a slow link
            they are the same; where the processor is what limits both, this one may well be the lower one.
    """

    latency: float
    bandwidth: float
    payload_bandwidth: float | None = None


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds per element that a codec costs a rank, without those of the network.

    Attributes:
        send: Copying, error feedback and encoding.
        receive: Decoding and adding up.
    """

    send: float = 0.0
    receive: float = 0.0


def dense_bytes(numel: int, world_size: int) -> float:
    """Bytes that a rank sends in an all-reduce of float32: 2 (n - 1) / n times the size."""
    return 2 * (world_size - 1) / world_size * 4 * numel


def sent_bytes(codec: Compressor, numel: int, world_size: int, collective: Collective, sides: int = 2) -> float:
    """Payload bytes that a rank sends for the mean of ``numel`` elements, on average over the ranks.

    Args:
        codec: The codec.
        numel: Number of elements.
        world_size: Number of ranks n.
        collective: "gather": (n - 1) payloads; "native": 2 (n - 1) / n payloads, without their heads; "chunked": the
            payloads of n - 1 chunks, and n - 1 times that of the own one (as long as the longest) or, one-sided, its
            float32 form.
        sides: 1 or 2.
    """
    if collective == "gather":
        return float((world_size - 1) * codec.payload_bytes(numel))
    if collective == "native":
        return 2 * (world_size - 1) / world_size * (codec.payload_bytes(numel) - codec.head)
    sizes = [aligned(codec.payload_bytes(end - begin)) for begin, end in chunks(numel, world_size, codec.block)]
    longest = chunks(numel, world_size, codec.block)[0][1]
    back = aligned((codec if sides == 2 else Identity()).payload_bytes(longest))
    return (world_size - 1) / world_size * sum(sizes) + (world_size - 1) * back


def choose(
    codec: Compressor, numel: int, world_size: int, collective: Collective | Literal["auto"] = "auto", sides: int = 2
) -> Collective:
    """Return the collective to use, which has to be able to carry the codec.

    "auto" takes the native all-reduce for linear codecs, gathering for sparse ones and wherever it sends no more than
    chunks do (so always for two ranks: it rounds once), and chunks otherwise.

    Raises:
        UsageError: If ``collective`` or ``sides`` is unknown, or "native" for a codec whose payloads cannot be added.
    """
    if collective not in (*COLLECTIVES, "auto"):
        raise UsageError(f"collective={collective!r} must be one of {', '.join(COLLECTIVES)} or auto")
    if sides not in (1, 2):
        raise UsageError(f"sides={sides!r} must be 1 (workers compress) or 2 (averages are compressed too)")
    if collective == "native" and not codec.linear:
        raise UsageError(f"collective='native' adds payloads, which those of {codec!r} do not allow: use 'auto'")
    if collective != "auto":
        return collective
    if codec.linear:
        return "native"
    if isinstance(codec.base if isinstance(codec, EF21) else codec, TopK):
        return "gather"
    gathered, chunked = (sent_bytes(codec, numel, world_size, kind, sides) for kind in ("gather", "chunked"))
    return "gather" if gathered <= chunked else "chunked"


def segment_length(
    codec: Compressor, world_size: int, collective: Collective | Literal["auto"] = "auto", sides: int = 2
) -> int:
    """Return the elements to exchange at a time: 256 Ki, or a multiple that makes messages of 32 KiB, up to 4 Mi.

    Shorter segments keep the link full on a busy machine; small messages cost processor time and headers.
    """
    length = 256 * 1024
    while length < 4 * 1024 * 1024:
        kind = choose(codec, length, world_size, collective, sides)
        if codec.payload_bytes(length) >= 32 * 1024 * (1 if kind == "gather" else world_size):
            break
        length *= 2
    return length


def keeps_residuals(codec: Compressor) -> bool:
    """Whether error feedback is worth a copy of the model: not for what a cast to 16 bits loses."""
    return (codec.delta(2**20) or 0.0) < 1 - 2.0**-15


def predict_seconds(
    codec: Compressor,
    numel: int,
    world_size: int,
    link: Link,
    speed: CodecSpeed = CodecSpeed(),
    *,
    collective: Collective | Literal["auto"] = "auto",
    sides: int = 2,
) -> float:
    r"""Return the time for the mean of ``numel`` elements over n ranks, if nothing overlaps with anything.

    .. math:: k \, t_l + \text{bytes} / \beta + \text{numel} \cdot c

    with latency :math:`t_l`, bandwidth :math:`\beta` of an all-reduce (Identity, native) or of payloads (the others),
    the bytes of :func:`sent_bytes`, and

    ========  ==================================  ==================================================
    exchange  collectives k                       seconds per element c, from s (send), r (receive)
    ========  ==================================  ==================================================
    Identity  1: what the link was measured with  0
    native    2, one for small parameters         s + r
    gather    2                                   s + n r
    chunked   3                                   s + r, then s / n + r if two-sided and r if not
    ========  ==================================  ==================================================

    Args:
        codec: The codec.
        numel: Number of elements, at least 1.
        world_size: Number of ranks n; one rank alone sends nothing.
        link: The link.
        speed: Speed of the codec; that of Identity is not looked at.
        collective: As in :func:`choose`.
        sides: 1 or 2.

    Returns:
        Seconds.
    """
    if world_size == 1:
        return 0.0
    if isinstance(codec, Identity):
        return link.latency + dense_bytes(numel, world_size) / link.bandwidth
    kind = choose(codec, numel, world_size, collective, sides)
    rounds, cost = 2, speed.send + speed.receive
    if kind == "gather":
        cost = speed.send + world_size * speed.receive
    elif kind == "chunked":
        rounds, cost = 3, cost + speed.receive + (speed.send / world_size if sides == 2 else 0.0)
    bandwidth = link.bandwidth if kind == "native" else link.payload_bandwidth or link.bandwidth
    return rounds * link.latency + sent_bytes(codec, numel, world_size, kind, sides) / bandwidth + numel * cost


def fastest(
    candidates: Sequence[Compressor],
    speeds: Sequence[CodecSpeed],
    numel: int,
    world_size: int,
    link: Link,
    *,
    margin: float = 0.1,
) -> Compressor:
    """Return the first candidate, or a later one if it is predicted to be faster by the share ``margin``.

    Args:
        candidates: Codecs, the most exact one first: a coarser one has to be faster by ``margin`` than the one chosen
            so far.
        speeds: Their speeds.
        numel: Number of elements.
        world_size: Number of ranks.
        link: The link.
        margin: 0.1 asks for 10 %.
    """
    best, least = candidates[0], float("inf")
    for codec, speed in zip(candidates, speeds, strict=True):
        seconds = predict_seconds(codec, numel, world_size, link, speed)
        if seconds < (1 - margin) * least:
            best, least = codec, seconds
    return best
