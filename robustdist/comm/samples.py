"""Batches as packed codes: what ranks send each other when they exchange samples instead of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from robustdist.comm.bitpack import pack, packed_bytes, unpack
from robustdist.comm.blocks import dither as draw_dither
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError

__all__ = ["Entry", "SamplePayload", "SampleQuantizer"]

_WHITE = 255


class Entry(NamedTuple):
    """Shape and type of one tensor of a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class SamplePayload:
    """What is sent for one batch.

    Attributes:
        data: Shape (num_bytes,), uint8: all that goes on the wire between ranks that know the entries.
        entries: The tensors of the batch: input, target, all others.
    """

    data: Tensor
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return len(self.data)


class SampleQuantizer:
    r"""Inputs in a few bits per component, labels in as many as they need, everything else as it is.

    .. math:: \hat x = l + \frac{h - l}{s} \,\mathrm{round}\Big(s\,\frac{x - l}{h - l} + u\Big), \quad s = 2^b - 1

    with l and h the bounds and u uniform in (-1/2, 1/2), so that the expectation of :math:`\hat x` is x; without dither
    u is 0. A value on a level stays there, so images of whole pixels (k/255) survive 8 bits exactly. Draws have 15
    bits: probabilities are exact to 2 ** -16.

    Inputs of type uint8 lie between 0 and 255 whatever the bounds say, and come back as uint8: the levels are then
    whole pixels, spaced as evenly as that allows, and rounding between two of them is unbiased all the same.

    Args:
        bits: Bits per component, 1 to 8.
        bounds: Smallest and largest possible value of a floating-point input, in its own units: for normalised images
            those of a black and a white pixel.
        dither: False rounds to the nearest level, which is biased.
        num_classes: Number of classes; labels then take :math:`\lceil \log_2 \rceil` of it bits. None leaves the
            target as it is, eight bytes for an int64.
        seed: Seed of the draws, which depend on (seed, rank, step).

    Raises:
        UsageError: If an argument is out of range.

    References:
        Hanna et al., "Quantizing data for distributed learning".

    Example:
        >>> quantizer = SampleQuantizer(bits=4, num_classes=10)
        >>> payload = quantizer.compress(torch.rand(32, 3, 32, 32), torch.arange(32) % 10)
        >>> payload.num_bytes  # half a byte per component and half a byte per label
        49168
        >>> x, y = quantizer.decompress(payload)
        >>> tuple(x.shape), y[:3]
        ((32, 3, 32, 32), tensor([0, 1, 2]))
    """

    def __init__(
        self,
        bits: int = 8,
        bounds: Sequence[float] = (0.0, 1.0),
        *,
        dither: bool = True,
        num_classes: int | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
            raise UsageError(f"bits={bits!r} must be a whole number from 1 to 8")
        if len(bounds) != 2 or not -math.inf < bounds[0] < bounds[1] < math.inf:
            raise UsageError(f"bounds={tuple(bounds)} must be the smallest and the largest value, such as (0, 1)")
        if num_classes is not None and (isinstance(num_classes, bool) or num_classes < 2):
            raise UsageError(f"num_classes={num_classes!r} must be at least 2, or None for targets sent as they are")
        self.bits, self.levels = bits, 2**bits - 1
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.dither, self.num_classes, self.seed = dither, num_classes, seed
        self.label_bits = None if num_classes is None else (num_classes - 1).bit_length()

    def __repr__(self) -> str:
        names = ("bits", "bounds", "dither", "num_classes", "seed")
        return f"SampleQuantizer({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def payload_bytes(self, entries: Sequence[Entry]) -> int:
        """Return the bytes on the wire for a batch of these tensors: input, target, all others."""
        return sum(self._sizes(entries))

    @torch.no_grad()
    def compress(self, x: Tensor, y: Tensor, *others: Tensor, rank: int = 0, step: int = 0) -> SamplePayload:
        """Encode a batch.

        Args:
            x: Input, any shape, floating point within the bounds, or uint8.
            y: Target; with ``num_classes`` integers from 0 below it, of any shape.
            *others: Further tensors, which travel as they are.
            rank: Rank of the process.
            step: Number of the batch.

        Raises:
            UsageError: If ``x`` is of another type or leaves the bounds, or ``y`` is no class index.
        """
        entries = tuple(Entry.of(tensor) for tensor in (x, y, *others))
        sizes = self._sizes(entries)
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device)
        parts = torch.split(data, sizes)
        pack(self._codes(x, rank, step), self.bits, parts[0])
        rest: list[Tensor] = [*others]
        if self.label_bits is None:
            rest.insert(0, y)
        else:
            self._pack_labels(y, parts[1])
        for tensor, part in zip(rest, parts[len(parts) - len(rest) :], strict=True):
            part.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        return SamplePayload(data, entries)

    @torch.no_grad()
    def decompress(self, payload: SamplePayload) -> tuple[Tensor, ...]:
        """Return input, target and all others, of the types and shapes that were compressed.

        Raises:
            UsageError: If the payload has another length than this quantizer makes for such a batch.
        """
        sizes = self._sizes(payload.entries)
        if payload.num_bytes != sum(sizes):
            raise UsageError(
                f"the payload has {payload.num_bytes} bytes where {self!r} makes {sum(sizes)}: "
                "decompress with the quantizer that compressed"
            )
        parts = torch.split(payload.data, sizes)
        tensors = [self._input(parts[0], payload.entries[0])]
        for entry, part in zip(payload.entries[1:], parts[1:], strict=True):
            if self.label_bits is not None and len(tensors) == 1:
                tensors.append(self._labels(part, entry))
            else:  # a copy, which begins where any type may begin
                tensors.append(part.clone().view(entry.dtype).view(entry.shape))
        return tuple(tensors)

    def _sizes(self, entries: Sequence[Entry]) -> list[int]:
        sizes = [entry.numel * entry.dtype.itemsize for entry in entries]
        sizes[0] = packed_bytes(entries[0].numel, self.bits)
        if self.label_bits is not None:
            sizes[1] = sum(packed_bytes(entries[1].numel, width) for width in _planes(self.label_bits))
        return sizes

    # --- inputs

    def _codes(self, x: Tensor, rank: int, step: int) -> Tensor:
        """Shape (x.numel(),), uint8: the level of every component."""
        flat = x.reshape(-1)
        if x.dtype == torch.uint8:
            places = self._pixel_places(x.device)[flat.int()]
        elif x.is_floating_point():
            self._check_bounds(flat)
            low, high = self.bounds
            places = flat.to(torch.float32, copy=True).sub_(low).mul_(self.levels / (high - low))
        else:
            raise UsageError(f"the input is of type {x.dtype}: only floating-point and uint8 inputs have levels")
        if self.dither:
            generator = torch.Generator(x.device).manual_seed(derive_seed(self.seed, "samples", rank, step))
            places.add_(draw_dither(len(places), places.device, generator), alpha=2.0**-16)
        return places.round_().clamp_(0, self.levels).to(torch.uint8)

    def _input(self, data: Tensor, entry: Entry) -> Tensor:
        codes = torch.empty(entry.numel, dtype=torch.uint8, device=data.device)
        unpack(data, self.bits, codes)
        if entry.dtype == torch.uint8:
            return self._pixels(data.device).to(torch.uint8)[codes.int()].view(entry.shape)
        low, high = self.bounds
        # divided first: k / 255 is then the very float that scaled the image
        values = codes.to(torch.promote_types(entry.dtype, torch.float32)).div_(self.levels)
        return values.mul_(high - low).add_(low).to(entry.dtype).view(entry.shape)

    def _check_bounds(self, flat: Tensor) -> None:
        if not len(flat):
            return
        least, most = (float(value) for value in torch.aminmax(flat))
        if not (self.bounds[0] <= least and most <= self.bounds[1]):  # also if one is NaN
            raise UsageError(
                f"bounds={self.bounds} do not hold for this batch, whose values lie between {least:.6g} and "
                f"{most:.6g}: give the smallest and largest value that an input can have"
            )

    def _pixels(self, device: torch.device) -> Tensor:
        """Shape (levels + 1,), float32: the whole pixels that are levels for uint8."""
        steps = torch.arange(self.levels + 1, dtype=torch.float32, device=device)
        return steps.mul_(_WHITE / self.levels).round_()

    def _pixel_places(self, device: torch.device) -> Tensor:
        """Shape (256,): where every pixel lies among the levels; between two of them in proportion."""
        pixels = self._pixels(device)
        values = torch.arange(_WHITE + 1, dtype=torch.float32, device=device)
        below = torch.searchsorted(pixels, values, right=True).sub_(1).clamp_(max=self.levels - 1)
        return below + (values - pixels[below]) / (pixels[below + 1] - pixels[below])

    # --- labels

    def _pack_labels(self, y: Tensor, out: Tensor) -> None:
        assert self.label_bits is not None
        assert self.num_classes is not None
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise UsageError(
                f"num_classes={self.num_classes} needs class indices, but the target is of type {y.dtype}: "
                "leave num_classes out"
            )
        flat = y.reshape(-1)
        if len(flat) and not (flat.min() >= 0 and flat.max() < self.num_classes):
            raise UsageError(
                f"num_classes={self.num_classes} does not hold for this batch, whose labels lie between "
                f"{int(flat.min())} and {int(flat.max())}: give the number of classes, or None for any labels"
            )
        start = 0
        for place, width in enumerate(_planes(self.label_bits)):
            size = packed_bytes(len(flat), width)
            plane = flat.long().bitwise_right_shift(8 * place).bitwise_and_(0xFF).to(torch.uint8)
            pack(plane, width, out[start : start + size])
            start += size

    def _labels(self, data: Tensor, entry: Entry) -> Tensor:
        assert self.label_bits is not None
        labels = torch.zeros(entry.numel, dtype=torch.int64, device=data.device)
        plane = torch.empty(entry.numel, dtype=torch.uint8, device=data.device)
        start = 0
        for place, width in enumerate(_planes(self.label_bits)):
            size = packed_bytes(entry.numel, width)
            unpack(data[start : start + size], width, plane)
            labels += plane.long() << (8 * place)
            start += size
        return labels.to(entry.dtype).view(entry.shape)


def _planes(bits: int) -> list[int]:
    """Cut a number of bits into bytes and a rest, lowest first."""
    return [min(8, bits - start) for start in range(0, bits, 8)]
