"""What a collective sends, by formula, and which one is chosen."""

from __future__ import annotations

from typing import Literal, TypeAlias

from robustdist.comm.base import Compressor
from robustdist.comm.cast import Identity
from robustdist.comm.collectives import aligned, chunks
from robustdist.comm.ef21 import EF21
from robustdist.comm.sparsify import TopK
from robustdist.errors import UsageError

__all__ = ["COLLECTIVES", "Collective", "choose", "dense_bytes", "sent_bytes"]

Collective: TypeAlias = Literal["chunked", "gather", "native"]
COLLECTIVES: tuple[Collective, ...] = ("chunked", "gather", "native")


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
        UsageError: If ``collective`` is unknown, or "native" for a codec whose payloads cannot be added.
    """
    if collective not in (*COLLECTIVES, "auto"):
        raise UsageError(f"collective={collective!r} must be one of {', '.join(COLLECTIVES)} or auto")
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
