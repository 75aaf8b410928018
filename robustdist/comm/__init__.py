"""Compressed communication: codecs for gradients, usable on any tensor with or without ``torch.distributed``."""

from robustdist.comm.base import Compressor, Payload
from robustdist.comm.cast import BF16, FP16, Identity
from robustdist.comm.controller import BitController, BitSchedule, FixedBits
from robustdist.comm.dgc import DGC
from robustdist.comm.ef21 import EF21
from robustdist.comm.error_feedback import ErrorFeedback, Memory
from robustdist.comm.float_codes import FP8, Natural
from robustdist.comm.low_rank import PowerSGD
from robustdist.comm.mqgrad import MQGrad
from robustdist.comm.quantize import QSGD, Int8, TernGrad
from robustdist.comm.reducer import MomentumReducer
from robustdist.comm.registry import make_compressor, make_controller
from robustdist.comm.samples import SampleQuantizer
from robustdist.comm.sign import Sign
from robustdist.comm.sparsify import RandomK, TopK

__all__ = [
    "BF16",
    "DGC",
    "EF21",
    "FP8",
    "FP16",
    "QSGD",
    "BitController",
    "BitSchedule",
    "Compressor",
    "ErrorFeedback",
    "FixedBits",
    "Identity",
    "Int8",
    "MQGrad",
    "Memory",
    "MomentumReducer",
    "Natural",
    "Payload",
    "PowerSGD",
    "RandomK",
    "SampleQuantizer",
    "Sign",
    "TernGrad",
    "TopK",
    "make_compressor",
    "make_controller",
]
