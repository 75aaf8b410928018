"""Codecs and bit controllers by the names that people type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from robustdist.comm.base import Compressor
from robustdist.comm.cast import BF16, FP16, Identity
from robustdist.comm.controller import BitController, BitSchedule, FixedBits
from robustdist.comm.dgc import DGC
from robustdist.comm.ef21 import EF21
from robustdist.comm.float_codes import FP8, Natural
from robustdist.comm.low_rank import PowerSGD
from robustdist.comm.mqgrad import MQGrad
from robustdist.comm.quantize import QSGD, Int8, TernGrad
from robustdist.comm.sign import Sign
from robustdist.comm.sparsify import RandomK, TopK
from robustdist.errors import UsageError

__all__ = ["COMPRESSORS", "CONTROLLERS", "make_compressor", "make_controller"]

#: All codecs by their lower-case class name.
COMPRESSORS: dict[str, type[Compressor]] = {
    codec.__name__.lower(): codec
    for codec in (
        Identity, FP16, BF16, FP8, Int8, QSGD, TernGrad, Sign, Natural, TopK, RandomK, DGC, PowerSGD, EF21,
    )
}  # fmt: skip

#: All bit controllers by the name of their policy.
CONTROLLERS: dict[str, type[BitController]] = {"fixed": FixedBits, "schedule": BitSchedule, "mqgrad": MQGrad}


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
    return _make(name, COMPRESSORS, "compressor", settings)


def make_controller(name: str, **settings: Any) -> BitController:
    """Return the bit controller of this policy.

    Args:
        name: "fixed", "schedule" or "mqgrad".
        **settings: Arguments of the class.

    Raises:
        UsageError: If there is no such policy, or it does not take these arguments.

    Example:
        >>> make_controller("schedule", schedule={0: 8, 1000: 4})
        BitSchedule(schedule={0: 8, 1000: 4})
    """
    return _make(name, CONTROLLERS, "bits", settings)


_T = TypeVar("_T")


def _make(name: str, kinds: Mapping[str, type[_T]], option: str, settings: Mapping[str, Any]) -> _T:
    kind = kinds.get(name.lower())
    if kind is None:
        names = difflib.get_close_matches(name.lower(), kinds, 1) or list(kinds)
        choices = " or ".join(kinds[other].__name__ if option == "compressor" else other for other in names)
        raise UsageError(f"{option}={name!r} is not known: choose {choices}")
    try:
        return kind(**settings)
    except TypeError as error:
        raise UsageError(f"{option}={name!r} does not take these settings: {error}") from None
