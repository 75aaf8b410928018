"""Codecs by the names that people type."""

from __future__ import annotations

import difflib
from typing import Any

from robustdist.comm.base import Compressor
from robustdist.comm.cast import BF16, FP16, Identity
from robustdist.comm.dgc import DGC
from robustdist.comm.ef21 import EF21
from robustdist.comm.float_codes import FP8, Natural
from robustdist.comm.low_rank import PowerSGD
from robustdist.comm.quantize import QSGD, Int8, TernGrad
from robustdist.comm.sign import Sign
from robustdist.comm.sparsify import RandomK, TopK
from robustdist.errors import UsageError

__all__ = ["COMPRESSORS", "make_compressor"]

#: All codecs by their lower-case class name.
COMPRESSORS: dict[str, type[Compressor]] = {
    codec.__name__.lower(): codec
    for codec in (
        Identity, FP16, BF16, FP8, Int8, QSGD, TernGrad, Sign, Natural, TopK, RandomK, DGC, PowerSGD, EF21,
    )
}  # fmt: skip


def make_compressor(name: str, **settings: Any) -> Compressor:
    """Return the codec of this class name, upper or lower case.

    Args:
        name: For example "qsgd".
        **settings: Arguments of the class.

    Raises:
        UsageError: If there is no such codec, or it does not take these arguments.

    Example:
        >>> make_compressor("qsgd", bits=4)
        QSGD(bits=4, block=512, stochastic=True, seed=0)
    """
    kind = COMPRESSORS.get(name.lower())
    if kind is None:
        names = difflib.get_close_matches(name.lower(), COMPRESSORS, 1) or list(COMPRESSORS)
        choices = " or ".join(COMPRESSORS[other].__name__ for other in names)
        raise UsageError(f"compressor={name!r} is not known: choose {choices}")
    try:
        return kind(**settings)
    except TypeError as error:
        raise UsageError(f"compressor={name!r} does not take these settings: {error}") from None
