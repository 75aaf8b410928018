"""Sending few entries: the largest, or random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from robustdist.comm.base import Compressor, count
from robustdist.comm.scratch import TILE, scratch
from robustdist.comm.tiles import TileCodec, floats
from robustdist.comm.verdicts import is_finite
from robustdist.errors import UsageError
from robustdist.types import Number, parse_number

__all__ = ["RandomK", "TopK", "check_ratio", "kept"]

_REGION = 2**16  # elements that an offset of 16 bits tells apart
_SAMPLES = 2**14  # magnitudes from which the threshold is guessed
_TINY = 1  # the bits of the smallest positive float32: a zero is never worth sending


class TopK(Compressor):
    r"""The k entries of largest magnitude, :math:`k = \max(1, \lceil \text{ratio} \cdot d \rceil)`, all others 0.

    Exact over the whole tensor; of equal magnitudes the first ones are kept. The payload holds the number of entries in
    every region of 65536, then the values, then 16-bit offsets inside the regions. If fewer than k entries are not
    zero, the rest of the payload is filled with zeros. If any entry is not finite, all k values are NaN.

    Args:
        ratio: Share of entries to keep, in (0, 1].
        values: "fp32" sends values as they are, 6 bytes per entry; "fp16" rounds them, after division by a power of
            two that brings the largest near 2 ** 15, to 4 bytes per entry.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Stich et al., "Sparsified SGD with Memory".

    Example:
        >>> codec = TopK(ratio=0.25)
        >>> codec.decompress(codec.compress(torch.tensor([-5.0, 1.0, 0.5, -0.1])))
        tensor([-5.,  0.,  0.,  0.])
    """

    def __init__(self, ratio: Number = 0.01, *, values: Literal["fp32", "fp16"] = "fp32") -> None:
        super().__init__()
        self.ratio = check_ratio(ratio)
        if values not in ("fp32", "fp16"):
            raise UsageError(f"values={values!r} must be 'fp32' or 'fp16'")
        self.values = values

    def delta(self, numel: int) -> float:
        """Return k / d, reached by entries of equal magnitude (less 2 ** -22 of it with "fp16")."""
        share = kept(numel, self.ratio) / numel if numel else 1.0
        return share * (1 - 2.0**-22) if self.values == "fp16" else share

    def payload_bytes(self, numel: int | Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return 4 bytes per region, 6 (or 4) per kept entry, and 4 for the power of two of "fp16"."""
        numel = count(numel)
        num_kept, half = kept(numel, self.ratio), self.values == "fp16"
        return 4 * -(-numel // _REGION) + (4 if half and numel else 0) + num_kept * (4 if half else 6)

    def encode(self, x: Tensor, out: Tensor, *, rank: int = 0, step: int = 0, name: str = "") -> None:
        """Select, sort by place, write."""
        flat = x.view(-1)
        if not len(flat):
            return
        counts, scale, values, offsets = self._parts(out, len(flat))
        finite = is_finite(flat)
        places = largest(flat, len(offsets)) if finite else torch.arange(len(offsets), device=x.device)
        regions = places // _REGION
        counts.copy_(torch.bincount(regions, minlength=len(counts)))
        # the padding follows the entries and is counted in the last region: offset 0, value 0
        counts[-1] += len(offsets) - len(places)
        offsets.zero_()
        offsets[: len(places)].copy_((places - regions * _REGION) - 2**15)
        offsets[len(places) :].fill_(-(2**15))
        values.zero_()
        chosen = flat.index_select(0, places).float()
        if scale is not None:
            top = chosen.abs().amax(0, keepdim=True) if len(chosen) else chosen.new_zeros(1)
            power = (top.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone, exact
            scale.copy_(power.mul_(2.0**-14).clamp_(min=2.0**-126))
            chosen = chosen / scale
        values[: len(places)].copy_(chosen)
        if not finite:
            values.fill_(math.nan)

    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Scatter; overwriting clears everything else."""
        flat = out.view(-1)
        if alpha is None:
            flat.zero_()
        if not len(flat):
            return
        counts, scale, values, offsets = self._parts(data, len(flat))
        starts = torch.arange(len(counts), device=data.device) * _REGION
        places = torch.repeat_interleave(starts, counts.long(), output_size=len(offsets)) + (offsets.long() + 2**15)
        decoded = values.float() if scale is None else values.float() * scale
        flat.index_add_(0, places, decoded.to(flat.dtype), alpha=1 if alpha is None else alpha)

    def _parts(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return views: entries per region (int32), the power of two, the values, the offsets less 2 ** 15 (int16)."""
        regions, num_kept, half = -(-numel // _REGION), kept(numel, self.ratio), self.values == "fp16"
        start = 4 * regions + (4 if half else 0)
        end = start + num_kept * (2 if half else 4)
        values = data[start:end].view(torch.float16 if half else torch.float32)
        scale = floats(data[4 * regions : start]) if half else None
        return data[: 4 * regions].view(torch.int32), scale, values, data[end:].view(torch.int16)


class RandomK(TileCodec):
    r"""One random entry out of every :math:`d/k`, times their number; all others 0.

    The entries of a tile are cut into :math:`k` runs of :math:`n_j` neighbours (equal up to one), of each run one is
    sent: unbiased, without sorting and without indices, because the ranks draw alike from (seed, step, name), and the
    8 bytes of that key are in the payload. So values of several ranks may be added as they are. If an entry of a tile
    is not finite, all values of the tile are NaN. The draws are made on the CPU for all devices.

    Args:
        ratio: Share of entries to send, in (0, 1].
        scaled: False leaves out the factor :math:`n_j`: biased, but a contraction, as error feedback needs.
        seed: Seed of the draws, the same on all ranks.

    Raises:
        UsageError: If ``ratio`` is out of range.

    References:
        Stich et al., "Sparsified SGD with Memory".
    """

    linear = True
    head = 8

    def __init__(self, ratio: Number = 0.01, *, scaled: bool = True, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.ratio = check_ratio(ratio)
        self.scaled = scaled
        self.unbiased = scaled

    def omega(self, numel: int) -> float | None:
        """Return the length of the longest run less 1."""
        return self._longest_run(numel) - 1.0 if self.scaled else None

    def delta(self, numel: int) -> float | None:
        """Return 1 over the length of the longest run, without the factor; with it, there is none."""
        return (1.0 if self._longest_run(numel) == 1 else None) if self.scaled else 1 / self._longest_run(numel)

    def contractive(self) -> Compressor:
        """Return the same choice without the factor."""
        return RandomK(self.ratio, scaled=False, seed=self.seed)

    def summable(self, data: Tensor) -> Tensor:
        """Return the values behind the key."""
        return floats(data[self.head :])

    def tile_bytes(self, numel: int) -> int:
        """Return 4 bytes per entry sent."""
        return 4 * kept(numel, self.ratio)

    def draws(self, out: Tensor, rank: int, step: int, name: str) -> torch.Generator:
        """Write the key, which is the same on all ranks."""
        generator = self.generator(torch.device("cpu"), "choose", step, name)
        # through a copy: a payload may begin where an integer of 8 bytes may not
        out[: self.head].copy_(torch.tensor([generator.initial_seed()]).view(torch.uint8))
        return generator

    def draws_again(self, data: Tensor) -> torch.Generator:
        """Read the key."""
        return torch.Generator().manual_seed(int(data[: self.head].clone().view(torch.int64)))

    def encode_tile(self, x: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Gather one entry per run."""
        places, lengths = self._runs(len(x), x.device, generator)
        values = floats(out)
        torch.index_select(x, 0, places, out=values)
        if self.scaled:
            values.mul_(lengths)
        if not is_finite(x):
            values.fill_(math.nan)

    def decode_tile(self, data: Tensor, out: Tensor, generator: torch.Generator | None) -> None:
        """Scatter over zeros."""
        places, _ = self._runs(len(out), out.device, generator)
        out.zero_().index_copy_(0, places, floats(data))

    def _runs(self, numel: int, device: torch.device, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return per run the place drawn and its length."""
        num_kept = kept(numel, self.ratio)
        bounds = torch.arange(num_kept + 1) * numel // num_kept
        lengths = bounds[1:] - bounds[:-1]
        draws = torch.empty(num_kept, dtype=torch.int64).random_(generator=generator)
        return (bounds[:-1] + draws % lengths).to(device), lengths.to(device)

    def _longest_run(self, numel: int) -> int:
        parts = [self.tile] * (numel >= self.tile) + [numel % self.tile] * (numel % self.tile > 0)
        return max((-(-part // kept(part, self.ratio)) for part in parts), default=1)


def check_ratio(ratio: Number) -> float:
    """Return a kept share as a float.

    Raises:
        UsageError: If it is not in (0, 1].
    """
    value = parse_number(ratio, "ratio")
    if not 0 < value <= 1:
        raise UsageError(f"ratio={ratio!r} must be above 0 and at most 1: it is the share of entries that is kept")
    return value


def kept(numel: int, ratio: float) -> int:
    """Entries kept of ``numel``: the share rounded up, so that a non-empty tensor sends at least one.

    Example:
        >>> kept(1000, 0.01), kept(1001, 0.01), kept(3, 0.01), kept(0, 0.01)
        (10, 11, 1, 0)
    """
    return min(numel, max(1, math.ceil(round(numel * ratio, 6))))  # rounded: 100 * 0.07 is not 7


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending places of the ``k`` largest magnitudes of flat, finite ``x``; fewer if fewer are not zero.

    A threshold guessed from a sample leaves few candidates, among which the choice is exact.
    """
    candidates = None
    if 4 * k < len(x) and len(x) > _SAMPLES:
        sample = x[:: len(x) // _SAMPLES].float().abs_()
        expected = len(sample) * k / len(x)
        # a margin of four standard deviations and one, on the side of too many candidates
        rank = min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 1))
        guess = int(sample.topk(rank).values[-1:].view(torch.int32))
        candidates = _reaching(x, max(guess, _TINY))
    if candidates is None or len(candidates) < k:
        candidates = _reaching(x, _TINY)
    if len(candidates) <= k:
        return candidates
    magnitudes = x.index_select(0, candidates).abs()  # advanced indexing is many times slower
    least = magnitudes.topk(k, sorted=False).values.amin()
    ahead = int((magnitudes > least).sum())
    ties = torch.cumsum(magnitudes == least, 0) <= k - ahead
    chosen = (magnitudes > least) | ((magnitudes == least) & ties)
    return candidates.index_select(0, torch.nonzero(chosen).view(-1))


def _reaching(x: Tensor, threshold: int) -> Tensor:
    """Return the ascending places where the bits of the magnitude, as an integer, reach ``threshold``."""
    found = []
    for begin in range(0, len(x), TILE):
        tile = x[begin : begin + TILE]
        if tile.dtype != torch.float32:
            tile = scratch("tile", len(tile), torch.float32, x.device).copy_(tile)
        flags = scratch("flags", -(-len(tile) // 8) * 8, torch.int8, x.device)
        flags[len(tile) :].zero_()
        # magnitudes of floats are ordered as integers are, and comparing to a bool is slow
        bits = scratch("bits", len(tile), torch.int32, x.device)
        torch.bitwise_and(tile.view(torch.int32), 0x7FFFFFFF, out=bits).sub_(threshold).bitwise_right_shift_(31)
        flags[: len(tile)].copy_(bits).bitwise_not_()
        # eight flags at a time: most groups hold none
        words = flags.view(torch.int64)
        groups = torch.nonzero(words).view(-1)
        places = torch.nonzero(words.index_select(0, groups).view(torch.int8)).view(-1)
        found.append(groups.index_select(0, places >> 3).mul_(8).add_(places & 7).add_(begin))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=x.device)
