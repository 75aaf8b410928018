"""Random search over patches of an image, one stream of draws per search."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustdist.attacks.functional import per_row
from robustdist.attacks.problem import Problem
from robustdist.attacks.queue import Engine, Items, Progress

__all__ = ["ENGINES", "patch_share"]

#: The patch shrinks to half its area after these of 10,000 queries.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_SCHEDULE_LENGTH = 10_000
_NUM_TILES = 5
_TINY = 1e-12


def patch_share(query: int, p_init: float = 0.8, queries: int = _SCHEDULE_LENGTH) -> float:
    """Return the share of the image that the square of this query covers; ``queries`` is the schedule's length.

    Example:
        >>> patch_share(0), patch_share(300), patch_share(150, queries=5000)
        (0.8, 0.1, 0.1)
    """
    place = query * _SCHEDULE_LENGTH // queries
    return p_init * 0.5 ** sum(place > halving for halving in _HALVINGS)


class _Layout(NamedTuple):
    """How the entries of a row are read as channels of an image."""

    channels: int
    height: int
    width: int

    @classmethod
    def of(cls, x: Tensor) -> _Layout:
        """Images as they are; signals as one line per channel; anything else as one line."""
        if x.dim() == 4:
            return cls(*x.shape[1:])
        if x.dim() == 3:
            return cls(x.shape[1], 1, x.shape[2])
        return cls(1, 1, x[0].numel())


@dataclass
class _Searches(Items):
    """Searches in progress; ``count`` is the number of queries answered and lives on the CPU."""

    run: Tensor
    y: Tensor
    best: Tensor
    margin: Tensor
    count: Tensor


class _SquareEngine(Engine[_Searches]):
    """What the norms share: draws, sizes of the patches, and which proposals are kept."""

    #: Uniform draws per query in front of the signs of the channels.
    num_places = 2

    def __init__(self, problem: Problem, queries: int, p_init: float, restarts: int, *, rescale: bool) -> None:
        self.problem, self.queries = problem, queries
        self.num_groups = restarts
        self.layout = layout = _Layout.of(problem.x)
        device = problem.x.device
        length = queries if rescale else _SCHEDULE_LENGTH
        sizes = [self.patch_size(patch_share(query, p_init, length)) for query in range(queries)]
        self.patch = torch.tensor(sizes, device=device)
        self.extent = torch.tensor([layout.height, layout.width], device=device)
        self.rows = torch.arange(layout.height, device=device)
        self.columns = torch.arange(layout.width, device=device)
        # the draws of a search lie in a slot, which is used again after its end
        self._draws, self._starts = torch.empty(0, device=device), torch.empty(0, device=device)
        self._in_use = torch.empty(0, dtype=torch.long, device=device)

    def start(self, rows: Tensor, group: int) -> _Searches:
        problem, layout, num = self.problem, self.layout, len(rows)
        per_query = self.num_places + layout.channels
        length = self.start_length + (self.queries - 1) * per_query
        # everything that a row will ever draw, in one call of its generator
        draws = problem.noise_of(rows).uniform(torch.empty(num, length, device=rows.device), "square", group)
        slots = self._slots(num, per_query)
        self._starts[slots] = draws[:, : self.start_length]
        self._draws[slots] = draws[:, self.start_length :].view(num, self.queries - 1, per_query)
        return _Searches(
            image=rows,
            x=problem.x[rows],
            run=slots,
            y=problem.y[rows],
            best=problem.x[rows],
            margin=torch.full((num,), -math.inf, device=rows.device),
            count=torch.zeros(num, dtype=torch.long),
        )

    def advance(self, items: _Searches) -> Progress:
        """Answer the next query of every search."""
        self._in_use = items.run
        candidate = self._propose(items)
        changed = (candidate != items.best).flatten(1).any(1) | (items.count == 0).to(candidate.device)
        success = torch.zeros_like(changed)
        if not self.problem.rowwise:
            changed |= changed.any()
        asked = changed.nonzero()[:, 0]
        if len(asked):
            self._ask(items, candidate, asked, success)
        items.count = items.count + 1
        return Progress(items.best, items.margin, success, items.count >= self.queries)

    @property
    @abstractmethod
    def start_length(self) -> int:
        """Number of uniform draws behind the starting point."""

    @abstractmethod
    def patch_size(self, share: float) -> tuple[int, int]:
        """Height and width of the patch that covers about this share of the image."""

    @abstractmethod
    def start_point(self, items: _Searches, draws: Tensor) -> Tensor:
        """Return the starting points."""

    @abstractmethod
    def propose(self, items: _Searches, draws: Tensor, query: Tensor) -> Tensor:
        """Return one candidate per search, given the number of its query and the draws of that."""

    def _slots(self, num: int, per_query: int) -> Tensor:
        """Return slots for ``num`` new searches: those of searches that have left, and new ones."""
        if len(self._draws) == 0:
            self._starts = self._starts.new_empty(0, self.start_length)
            self._draws = self._draws.new_empty(0, self.queries - 1, per_query)
        free = torch.ones(len(self._draws), dtype=torch.bool, device=self._draws.device)
        free[self._in_use] = False
        slots = free.nonzero()[:num, 0]
        missing = num - len(slots)
        if missing:
            slots = torch.cat([slots, torch.arange(missing, device=slots.device) + len(self._draws)])
            self._starts = torch.cat([self._starts, self._starts.new_empty(missing, self.start_length)])
            self._draws = torch.cat([self._draws, self._draws.new_empty(missing, *self._draws.shape[1:])])
        self._in_use = torch.cat([self._in_use, slots])
        return slots

    def _propose(self, items: _Searches) -> Tensor:
        first = items.count == 0
        if bool(first.all()):
            return self.start_point(items, self._starts[items.run])
        count = items.count.to(items.run.device)
        draws = self._draws[items.run, (count - 1).clamp(min=0)]
        candidate = self.propose(items, draws, count)
        if bool(first.any()):
            new = first.nonzero()[:, 0].to(candidate.device)
            fresh = items.take(new)
            candidate[new] = self.start_point(fresh, self._starts[fresh.run])
        return candidate

    def _ask(self, items: _Searches, candidate: Tensor, asked: Tensor, success: Tensor) -> None:
        """Query the model where a candidate differs from the point at hand, and keep what is better."""
        everything = len(asked) == len(candidate)
        points, x, y = candidate, items.x, items.y
        if not everything:
            points, x, y = points[asked], x[asked], y[asked]
        with torch.no_grad():
            logits = self.problem.search_logits(points)
        success[asked] = fooled = self.problem.fooled(points, x, logits, y)
        margin = self.problem.loss(logits, y).float()
        better = torch.zeros_like(success)
        better[asked] = fooled | (margin > items.margin[asked])
        items.margin[asked] = torch.where(better[asked], margin, items.margin[asked])
        items.best = torch.where(per_row(better, candidate), candidate, items.best)

    def corner(self, draws: Tensor, size: Tensor) -> Tensor:
        """Return the upper left corners that two uniform draws stand for, shape (searches, 2)."""
        return (draws * (self.extent - size + 1)).long().minimum(self.extent - size)

    def window(self, corner: Tensor, size: Tensor) -> Tensor:
        """Return which pixels lie in the patch of each search, shape (searches, 1, height, width).

        Args:
            corner: Upper left corners, shape (searches, 2).
            size: Height and width of the patches, shape (searches, 2).
        """
        top, left = corner[..., None].unbind(1)
        height, width = size[..., None].unbind(1)
        in_rows = (self.rows >= top) & (self.rows < top + height)
        in_columns = (self.columns >= left) & (self.columns < left + width)
        return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


class _LinfEngine(_SquareEngine):
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

    def start_point(self, items: _Searches, draws: Tensor) -> Tensor:
        """Return vertical stripes."""
        up = draws.view(-1, self.layout.channels, 1, self.layout.width) >= 0.5
        return torch.where(up, self.high[items.image], self.low[items.image]).view_as(items.x)

    def propose(self, items: _Searches, draws: Tensor, query: Tensor) -> Tensor:
        """Return the points with one square of them recoloured, per channel to the upper or the lower corner."""
        if self._images is not items.image:
            self._images, self._corners = items.image, (self.high[items.image], self.low[items.image])
        size = self.patch[query]
        colour = torch.where(draws[:, 2:, None, None] >= 0.5, *self._corners)
        inside = self.window(self.corner(draws[:, :2], size), size)
        return torch.where(inside, colour, items.best.view_as(colour)).view_as(items.x)


class _L2Engine(_SquareEngine):
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

    def start_point(self, items: _Searches, draws: Tensor) -> Tensor:
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

    def propose(self, items: _Searches, draws: Tensor, query: Tensor) -> Tensor:
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

    def _at_radius(self, items: _Searches, delta: Tensor) -> Tensor:
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


ENGINES: dict[str, type[_SquareEngine]] = {"linf": _LinfEngine, "l2": _L2Engine}
