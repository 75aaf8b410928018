"""Methods of a codec that averaging would pass over."""

from __future__ import annotations

from robustdist.comm.base import Compressor
from robustdist.comm.cast import Identity
from robustdist.comm.low_rank import PowerSGD
from robustdist.errors import UsageError

__all__ = ["check_overrides"]


def check_overrides(codec: Compressor) -> None:
    """Refuse a codec with an ``encode`` or ``decode`` that the engine does not call.

    It calls ``encode_parts`` and ``decode_parts``. Those of tiled codecs do not go through ``encode`` and ``decode``,
    so whoever overrides the latter alone would train with the former. For ``Identity`` and ``PowerSGD`` it has
    all-reduces of its own.

    Raises:
        UsageError: Naming the class and the method.
    """
    order = type(codec).__mro__
    for method in ("encode", "decode"):
        parts = f"{method}_parts"
        own, by_parts = (next(kind for kind in order if name in vars(kind)) for name in (method, parts))
        for kind in (Identity, PowerSGD):
            above = order[: order.index(kind)] if kind in order else ()
            if own in above or by_parts in above:
                raise UsageError(
                    f"compressor={type(codec).__name__} has a method {method} of its own, and a {kind.__name__} "
                    "is averaged by plain all-reduces: derive it from Compressor"
                )
        if by_parts is not Compressor and order.index(own) < order.index(by_parts):
            raise UsageError(
                f"compressor={type(codec).__name__} overrides {method} in {own.__name__}, and gradients go through the "
                f"{parts} of {by_parts.__name__}: override {parts} too, or {method}_tile alone"
            )
