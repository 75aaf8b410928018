"""What the square attack proposes: recoloured squares (linf), and bumps that take budget from each other (l2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from robustdist.attacks.functional import per_row
from robustdist.attacks.problem import Problem
from robustdist.attacks.square_search import Searches, SquareEngine

__all__ = ["ENGINES"]

_NUM_TILES = 5
_TINY = 1e-12


class _LinfEngine(SquareEngine):
    """Every pixel sits on one of the two corners that ball and box leave it."""

    def __init__(self, problem: Problem, *args: Any, **kwargs: Any) -> None:
        super().__init__(problem, *args, **kwargs)
        low, high = problem.bounds if problem.bounds is not None else (-math.inf, math.inf)
        images = problem.x.view(-1, *self.layout)
        self.low, self.high = (images - problem.eps).clamp(min=low), (images + problem.eps).clamp(max=high)
        # corners of the images in the searches, which stay the same for many queries
        self._images: Tensor | None = None
        self._corners = self.high, self.low

    @property
    def start_length(self) -> int:
        """One sign per channel and column: vertical stripes."""
        return self.layout.channels * self.layout.width

    def patch_size(self, share: float) -> tuple[int, int]:
        """Return the side of the square twice; on a line, the length of the piece."""
        height, width = self.layout.height, self.layout.width
        if height == 1:
            return 1, max(1, round(share * width))
        side = max(1, round(math.sqrt(share * height * width)))
        return min(side, height), min(side, width)

    def start_point(self, items: Searches, draws: Tensor) -> Tensor:
        """Return vertical stripes."""
        up = draws.view(-1, self.layout.channels, 1, self.layout.width) >= 0.5
        return torch.where(up, self.high[items.image], self.low[items.image]).view_as(items.x)

    def propose(self, items: Searches, draws: Tensor, query: Tensor) -> Tensor:
        """Return the points with one square of them recoloured, per channel to the upper or the lower corner."""
        if self._images is not items.image:
            self._images, self._corners = items.image, (self.high[items.image], self.low[items.image])
        size = self.patch[query]
        colour = torch.where(draws[:, 2:, None, None] >= 0.5, *self._corners)
        inside = self.window(self.corner(draws[:, :2], size), size)
        return torch.where(inside, colour, items.best.view_as(colour)).view_as(items.x)


class _L2Engine(SquareEngine):
    """The budget moves between two windows; what is added has the shape of two bumps of opposite sign."""

    # corners of the two windows, and whether the bumps lie above each other
    num_places = 5

    def __init__(self, problem: Problem, *args: Any, **kwargs: Any) -> None:
        super().__init__(problem, *args, **kwargs)
        x = problem.x
        side = max(1, self.layout.height // _NUM_TILES), max(1, self.layout.width // _NUM_TILES)
        self._tile = _two_bumps(*side).to(x)
        sizes = sorted({tuple(size) for size in self.patch.tolist()})
        places = {size: place for place, size in enumerate(sizes)}
        self._bump = torch.tensor([places[tuple(size)] for size in self.patch.tolist()], device=x.device)
        self._bumps = x.new_zeros(len(sizes), max(size[0] for size in sizes), max(size[1] for size in sizes))
        for bumps, (height, width) in zip(self._bumps, sizes, strict=True):
            bumps[:height, :width] = _two_bumps(height, width)

    @property
    def start_length(self) -> int:
        """One sign per channel and tile, and one more draw per tile."""
        return (self.layout.channels + 1) * self._grid[0] * self._grid[1]

    @property
    def _grid(self) -> tuple[int, int]:
        return self.layout.height // self._tile.shape[0], self.layout.width // self._tile.shape[1]

    def patch_size(self, share: float) -> tuple[int, int]:
        """Return an odd side of at least 3, twice, as far as the image allows."""
        height, width = self.layout.height, self.layout.width
        largest = width if height == 1 else min(height, width)
        side = share * width if height == 1 else math.sqrt(share * height * width)
        side = min(max(round(side), 3) | 1, largest if largest % 2 else max(1, largest - 1))
        return min(side, height), side

    def start_point(self, items: Searches, draws: Tensor) -> Tensor:
        """Return tiles of bumps of random sign and orientation, scaled to the radius."""
        layout, (down, across) = self.layout, self._grid
        per_tile = draws.view(-1, layout.channels + 1, down, across)
        turned, signs = per_tile[:, :1], per_tile[:, 1:]
        height, width = self._tile.shape
        square = height == width
        tile = torch.where(turned[..., None, None] >= 0.5, self._tile.T if square else self._tile, self._tile)
        tiles = (tile * _sign(signs)[..., None, None]).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        delta = items.x.new_zeros(len(items.x), *layout)
        top, left = (layout.height - down * height) // 2, (layout.width - across * width) // 2
        delta[:, :, top : top + down * height, left : left + across * width] = tiles
        return self._at_radius(items, delta)

    def propose(self, items: Searches, draws: Tensor, query: Tensor) -> Tensor:
        """Return the points with the budget of two windows and what is unused, spent on the first window."""
        size, eps = self.patch[query], self.problem.eps
        first, second = self.corner(draws[:, :2], size), self.corner(draws[:, 2:4], size)
        here, there = self.window(first, size), self.window(second, size)
        delta = (items.best - items.x).view(-1, *self.layout)
        unused = (eps**2 - delta.square().sum((1, 2, 3), keepdim=True)).clamp(min=0)
        inside = delta.masked_fill(~here, 0.0)
        held = delta.masked_fill(~(here | there), 0.0).square().sum((2, 3), keepdim=True)
        available = held + unused / self.layout.channels
        bumps = self._placed(first, self._bump[query], here, draws[:, 4]) * _sign(draws[:, 5:])[..., None, None]
        added = bumps + inside / _length(inside)
        spent = added * (available.sqrt() / _length(added))
        return self._at_radius(items, torch.where(here, spent, delta.masked_fill(there, 0.0)))

    def _placed(self, corner: Tensor, bump: Tensor, here: Tensor, draws: Tensor) -> Tensor:
        """Return the bumps of each search at its window, shape (searches, 1, height, width)."""
        down = (self.rows - corner[:, :1]).clamp(0, self._bumps.shape[1] - 1)[:, :, None]
        across = (self.columns - corner[:, 1:]).clamp(0, self._bumps.shape[2] - 1)[:, None, :]
        values = self._bumps[bump[:, None, None], down, across]
        if self.layout.height > 1:
            turned = self._bumps[bump[:, None, None], across, down]
            values = torch.where(draws[:, None, None] >= 0.5, turned, values)
        return values[:, None].masked_fill(~here, 0.0)

    def _at_radius(self, items: Searches, delta: Tensor) -> Tensor:
        """Return the points at distance ``eps`` along ``delta``, clipped to the box."""
        delta = delta.view_as(items.x)
        lengths = torch.linalg.vector_norm(delta.flatten(1), dim=1).clamp(min=_TINY)
        return self.problem.clip(items.x + delta * per_row(self.problem.eps / lengths, delta))


def _two_bumps(height: int, width: int) -> Tensor:
    """Return a bump and its negative side by side, of unit length together."""
    half = width // 2
    bumps = torch.cat([_bump(height, half), -_bump(height, width - half)], dim=1)
    both: Tensor = bumps / torch.linalg.vector_norm(bumps)
    return both


def _bump(height: int, width: int) -> Tensor:
    r"""Return :math:`\sum_{i = d + 1}^{n + 1} i^{-2}`, with d the distance from the middle and n the largest one."""
    rows, columns = (torch.arange(length) - length // 2 for length in (height, width))
    away = torch.maximum(rows.abs()[:, None], columns.abs()[None, :])
    largest = max(height, width) // 2
    steps = torch.arange(1, largest + 2, dtype=torch.float64) ** -2.0
    # summed from the outer end
    heights: Tensor = steps.flip(0).cumsum(0).flip(0)
    return heights[away].float()


def _sign(draws: Tensor) -> Tensor:
    return (draws >= 0.5).to(draws.dtype).mul_(2).sub_(1)


def _length(delta: Tensor) -> Tensor:
    """Length per channel, safe to divide by."""
    return delta.square().sum((2, 3), keepdim=True).sqrt().clamp(min=_TINY)


ENGINES: dict[str, type[SquareEngine]] = {"linf": _LinfEngine, "l2": _L2Engine}
