"""Wrong settings and wrong tensors, told in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from robustdist import UsageError
from robustdist.comm import (
    DGC,
    EF21,
    FP8,
    FP16,
    QSGD,
    Identity,
    Int8,
    Natural,
    Payload,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
    make_compressor,
)
from robustdist.comm.engine import CommEngine
from robustdist.comm.overrides import check_overrides
from robustdist.comm.registry import COMPRESSORS
from robustdist.core.testing import run_ranks
from robustdist.strategies import CompressedDDPStrategy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[(lambda bits=bits: QSGD(bits), f"bits={bits!r} must be a whole number from 2 to 8") for bits in
          (0, 1, 9, -4, 4.0, True, "4", None)],
        *[(lambda codec=codec, ratio=ratio: codec(ratio), f"ratio={ratio!r} must be above 0 and at most 1")
          for codec in (TopK, RandomK, DGC) for ratio in (0, 0.0, 1.01, -0.1, float("nan"), float("inf"), "3/2")],
        (lambda: TopK("one"), "ratio='one' is not a number"),
        (lambda: TopK(values="int4"), "values='int4' must be 'fp32' or 'fp16'"),
        *[(lambda codec=codec, block=block: codec(block=block), f"block={block!r} must be a")
          for codec in (Int8, QSGD, TernGrad, Sign, Natural, FP8) for block in (0, -8, 12, 8.0, True)],
        *[(lambda clip=clip: TernGrad(clip=clip), f"clip={clip!r} ") for clip in (0, -1, float("inf"), "x")],
        (lambda: FP8("e3m4"), "format='e3m4' must be 'e4m3' or 'e5m2'"),
        *[(lambda rank=rank: PowerSGD(rank), f"rank={rank!r} must be a whole number of at least 1")
          for rank in (0, -1, 1.5, True)],
        *[(lambda momentum=momentum: DGC(momentum=momentum), f"momentum={momentum!r} ")
          for momentum in (1, -0.1, float("nan"), "x")],
        (lambda: EF21(DGC()), "has a memory of its own"),
        (lambda: EF21(EF21()), "has a memory of its own"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(make: Callable[[], object], message: str):
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fp8_without_support_names_the_way_out(monkeypatch):
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(UsageError, match=r"format='e4m3'.*use Int8 instead"):
        FP8()
    FP8("e5m2")


@pytest.mark.parametrize("x", [torch.arange(3), torch.ones(3, dtype=torch.bool), torch.ones(2, 2).to_sparse()])
@pytest.mark.parametrize("codec", [Identity(), Int8(), TopK(), DGC(), EF21(), PowerSGD()], ids=repr)
def test_only_dense_floating_point_tensors_are_taken(codec, x):
    with pytest.raises(UsageError, match="must be a dense floating-point tensor"):
        codec.compress(x)


@pytest.mark.parametrize("codec", [Identity(), FP16(), Int8(), Sign(), TopK(), PowerSGD(), EF21()], ids=repr)
def test_a_payload_of_another_codec_or_length_is_refused(codec):
    payload = QSGD(3).compress(torch.ones(1000))
    with pytest.raises(UsageError, match=r"decompress with the codec that compressed"):
        codec.decompress(payload)
    right = codec.compress(torch.ones(1000))
    with pytest.raises(UsageError, match="decompress with the codec"):
        codec.decompress(Payload(right.data[:-1], right.shape, right.dtype))


@pytest.mark.parametrize("raw", [b"", b"\x00", b"\x00\x03abc", b"\x09\x00"])
def test_bytes_that_are_no_payload_are_refused(raw):
    with pytest.raises(UsageError, match="no payload"):
        Payload.from_bytes(raw)


def test_names_of_compressors():
    assert repr(make_compressor("qsgd", bits=3)) == repr(QSGD(3))
    assert repr(make_compressor("TopK", ratio="1/50")) == repr(TopK(0.02))
    with pytest.raises(UsageError, match="compressor='qsdg' is not known: choose QSGD"):
        make_compressor("qsdg")
    with pytest.raises(UsageError, match=r"is not known: choose Identity or FP16 or .* or EF21"):
        make_compressor("zip")
    with pytest.raises(UsageError, match="compressor='int8' does not take these settings"):
        make_compressor("int8", bits=4)


class Halved(Int8):
    """Looks as if it changed what is sent."""

    def encode(self, x, out, **options):
        super().encode(x / 2, out, **options)


class HalvedAgain(Halved):
    """Inherits it."""


class Doubled(QSGD):
    def decode(self, data, out, **options):
        super().decode(data, out, **options)
        out.mul_(2)


class HalvedInParts(Halved):
    """Says how to do the same in parts, so nothing is passed over."""

    def encode_parts(self, numel, load, *args, **options):
        super().encode_parts(numel, lambda begin, length: load(begin, length) / 2, *args, **options)


class Plain(Identity):
    def encode(self, x, out, **options):
        super().encode(x.round(), out, **options)


class Factors(PowerSGD):
    def decode_parts(self, *args, **options):
        super().decode_parts(*args, **options)


class Sparse(TopK):
    """Not in tiles: the engine calls it."""

    def encode(self, x, out, **options):
        super().encode(x.abs(), out, **options)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Halved(), "compressor=Halved overrides encode in Halved, .* the encode_parts of TileCodec"),
        (HalvedAgain(), "compressor=HalvedAgain overrides encode in Halved, .*override encode_parts too"),
        (Doubled(4), "compressor=Doubled overrides decode in Doubled, .* or decode_tile alone"),
        (Plain(), "compressor=Plain has a method encode of its own, .*derive it from Compressor"),
        (Factors(), "compressor=Factors has a method decode of its own, and a PowerSGD"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_override_that_averaging_would_pass_over_is_refused(codec, message):
    def run(rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            CommEngine(codec)
        return str(caught.value)

    with pytest.raises(UsageError, match=message):
        CompressedDDPStrategy(codec)
    assert re.match(message, run_ranks(run, 1)[0])


def test_overrides_that_are_called_are_taken():
    for codec in (HalvedInParts(), Sparse(), EF21(Halved()), *(kind() for kind in COMPRESSORS.values())):
        check_overrides(codec)
