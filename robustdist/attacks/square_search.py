"""Random search over patches of an image, one stream of draws per search: the search itself, for any norm."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from robustdist.attacks.functional import per_row
from robustdist.attacks.problem import Problem
from robustdist.attacks.queue import Engine, Items, Progress

__all__ = ["Searches", "SquareEngine", "patch_share"]

#: The patch shrinks to half its area after these of 10,000 queries.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_SCHEDULE_LENGTH = 10_000
# Rows that proposals ahead of time may fill a forward pass up to: beyond, a row becomes little cheaper. Of each search
# at least a few: two rows cost little more than one.
_ROWS_AHEAD, _LEAST_AHEAD = 32, 4


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
class Searches(Items):
    """Searches in progress.

    Attributes:
        run: Slots of their draws.
        y: Labels.
        best, margin: The point at hand and what the attack loss is there.
        count: Number of answered queries, on the CPU.
        rejected: Number of queries since the last one that was kept.
    """

    run: Tensor
    y: Tensor
    best: Tensor
    margin: Tensor
    count: Tensor
    rejected: Tensor


class SquareEngine(Engine[Searches]):
    """What the norms share: draws, sizes of the patches, and which proposals are kept."""

    #: Uniform draws per query in front of the signs of the channels.
    num_places = 2

    def __init__(
        self, problem: Problem, queries: int, p_init: float, restarts: int, *, rescale: bool, rows_ahead: int = 0
    ) -> None:
        self.problem, self.queries = problem, queries
        self.rows_ahead = min(rows_ahead, _ROWS_AHEAD) if problem.rowwise else 0
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

    def start(self, rows: Tensor, group: int) -> Searches:
        """Return searches that have asked nothing yet."""
        problem, layout, num = self.problem, self.layout, len(rows)
        per_query = self.num_places + layout.channels
        length = self.start_length + (self.queries - 1) * per_query
        # everything that a row will ever draw, in one call of its generator
        draws = problem.noise_of(rows).uniform(torch.empty(num, length, device=rows.device), "square", group)
        slots = self._slots(num, per_query)
        self._starts[slots] = draws[:, : self.start_length]
        self._draws[slots] = draws[:, self.start_length :].view(num, self.queries - 1, per_query)
        return Searches(
            image=rows,
            x=problem.x[rows],
            run=slots,
            y=problem.y[rows],
            best=problem.x[rows],
            margin=torch.full((num,), -math.inf, device=rows.device),
            count=torch.zeros(num, dtype=torch.long),
            rejected=torch.zeros(num, dtype=torch.long, device=rows.device),
        )

    def advance(self, items: Searches) -> Progress:
        """Answer the next query of every search, and in free places those after it, as if all before were rejected.

        The first proposal that is kept makes those behind it void: they were made from the point before it.
        """
        self._in_use = items.run
        ahead = self._ahead(items)
        if ahead is None:
            success = self._answer(items)
            items.count = items.count + 1
            return Progress(items.best, items.margin, success, items.count >= self.queries)
        owner, begin = torch.repeat_interleave(ahead), ahead.cumsum(0) - ahead
        place = torch.arange(len(owner)) - begin[owner]
        trials = items.take(owner)
        trials.count = trials.count + place
        success = self._answer(trials)
        kept = (trials.rejected == 0).cpu()
        # the first proposal kept of each search; where there is none, the last one
        answered = begin + (ahead - 1).scatter_reduce(0, owner[kept], place[kept], "amin")
        outcome = trials.take(answered)
        items.best, items.margin, items.count = outcome.best, outcome.margin, outcome.count + 1
        items.rejected = torch.where(outcome.rejected == 0, 0, items.rejected + ahead.to(items.rejected.device))
        return Progress(items.best, items.margin, success[answered.to(success.device)], items.count >= self.queries)

    @property
    @abstractmethod
    def start_length(self) -> int:
        """Number of uniform draws behind the starting point."""

    @abstractmethod
    def patch_size(self, share: float) -> tuple[int, int]:
        """Height and width of the patch that covers about this share of the image."""

    @abstractmethod
    def start_point(self, items: Searches, draws: Tensor) -> Tensor:
        """Return the starting points."""

    @abstractmethod
    def propose(self, items: Searches, draws: Tensor, query: Tensor) -> Tensor:
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

    def _ahead(self, items: Searches) -> Tensor | None:
        """Return how many queries of each search to answer at once, on the CPU; None for one of each.

        As many as were rejected since the last gain, and a few: so little more is asked in vain than is used.
        """
        room = self.rows_ahead // len(items.count)
        if room < 2:
            return None
        ahead = (items.rejected.cpu() + _LEAST_AHEAD).clamp(max=room).minimum(self.queries - items.count)
        return ahead if int(ahead.max()) > 1 else None

    def _answer(self, items: Searches) -> Tensor:
        """Answer one query per item, keep what is better, and return which candidates fool the model."""
        candidate = self._propose(items)
        changed = (candidate != items.best).flatten(1).any(1) | (items.count == 0).to(candidate.device)
        success = torch.zeros_like(changed)
        if not self.problem.rowwise:
            changed |= changed.any()
        items.rejected = items.rejected + 1
        asked = changed.nonzero()[:, 0]
        if len(asked):
            self._ask(items, candidate, asked, success)
        return success

    def _propose(self, items: Searches) -> Tensor:
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

    def _ask(self, items: Searches, candidate: Tensor, asked: Tensor, success: Tensor) -> None:
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
        items.rejected = items.rejected.masked_fill(better, 0)

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
