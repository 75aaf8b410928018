"""Square attack: random search over square patches, without gradients."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.functional import per_row
from robustdist.attacks.losses import LossName, check_class_indices
from robustdist.attacks.queue import Engine, Items, Progress, run_queue
from robustdist.errors import UsageError
from robustdist.types import AttackLoss, Number, check_count

__all__ = ["Square", "patch_share"]

#: The patch shrinks to half its area after these of 10,000 queries.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_SCHEDULE_LENGTH = 10_000


class Square(Attack):
    """Random search: recolour one random square, keep it if the margin falls.

    A query proposes a square of the image, sets each channel of it to one corner of the ball (linf), or moves the
    budget of a second square into it (l2), and keeps the result if the own logit's lead over the best other falls. The
    squares start with the share ``p_init`` of the image and shrink on the published schedule, rescaled from 10,000 to
    ``queries``. It needs no gradient, so it also sees through gradients that vanish.

    All draws of a row come from one stream of its own, so the batch it sits in changes nothing. A proposal equal to
    the point at hand is answered without a forward pass, but counts as a query.

    Args:
        norm: "linf" or "l2".
        eps: Radius in pixel units.
        queries: Forward passes per image and restart, the one for the starting point included.
        p_init: Share of the image that the first squares cover, in (0, 1].
        restarts: Number of runs from different draws; later ones see the survivors of earlier ones.
        drop: Whether an image leaves as soon as it is misclassified.
        batch_size: Largest number of images in one forward pass; default the batch of the call.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`; ``attack_loss`` must stay "margin".

    Raises:
        UsageError: If an argument is out of range.

    References:
        Andriushchenko et al., "Square Attack: a Query-Efficient Black-box Adversarial Attack via Random Search".
    """

    def __init__(
        self,
        *,
        eps: Number = "8/255",
        queries: int = 5000,
        p_init: float = 0.8,
        restarts: int = 1,
        drop: bool = True,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_count(queries, "queries")
        check_count(restarts, "restarts")
        if batch_size is not None:
            check_count(batch_size, "batch_size")
        if not 0 < p_init <= 1:
            raise UsageError(f"p_init={p_init} must be in (0, 1]: it is the share of the image in the first square")
        if kwargs.get("norm", "linf") != "linf":
            raise UsageError(f"norm={kwargs['norm']!r} is not available for Square yet: use norm='linf'")
        if kwargs.setdefault("attack_loss", "margin") != "margin":
            raise UsageError("Square compares margins: leave attack_loss out, or use PGD for other losses")
        super().__init__(eps=eps, step_size=0.0, **kwargs)
        self.queries, self.p_init, self.restarts = queries, p_init, restarts
        self.drop, self.batch_size = drop, batch_size

    def perturb(self, problem: Problem) -> Tensor:
        """Return the best point of every image."""
        problem.followed.fill_(True)  # it follows no gradient
        with torch.no_grad():
            check_class_indices(problem.logits(problem.x[:1] if problem.rowwise else problem.x), problem.y[:1])
        engine = _LinfEngine(self, problem)
        return run_queue(problem, engine, batch_size=self.batch_size, drop=self.drop).x_adv

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Refuse any other loss than the margin."""
        if attack_loss == "margin":
            return self
        raise UsageError(f"Square compares margins, so attack_loss={attack_loss!r} cannot be used: remove it")

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values."""
        settings = super().settings()
        del settings["step_size"]
        return settings


def patch_share(query: int, queries: int, p_init: float) -> float:
    """Return the share of the image that the square of this query covers.

    Example:
        >>> patch_share(0, 10_000, 0.8), patch_share(300, 10_000, 0.8), patch_share(150, 5000, 0.8)
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

    def __init__(self, attack: Square, problem: Problem) -> None:
        self.attack, self.problem = attack, problem
        self.num_groups = attack.restarts
        self.layout = layout = _Layout.of(problem.x)
        device = problem.x.device
        shares = [patch_share(query, attack.queries, attack.p_init) for query in range(attack.queries)]
        self.patch = torch.tensor([self.patch_size(share) for share in shares], device=device)
        self.extent = torch.tensor([layout.height, layout.width], device=device)
        self.rows = torch.arange(layout.height, device=device)
        self.columns = torch.arange(layout.width, device=device)
        self._draws = torch.empty(0, device=device)
        self._starts = torch.empty(0, device=device)

    def start(self, rows: Tensor, group: int) -> _Searches:
        problem, attack, layout, num = self.problem, self.attack, self.layout, len(rows)
        per_query = self.num_places + layout.channels
        length = self.start_length + (attack.queries - 1) * per_query
        # everything that a row will ever draw, in one call of its generator
        draws = problem.noise_of(rows).uniform(torch.empty(num, length, device=rows.device), "square", group)
        self._starts = torch.cat([self._starts, draws[:, : self.start_length]])
        self._draws = torch.cat([self._draws, draws[:, self.start_length :].view(num, -1, per_query)])
        return _Searches(
            image=rows,
            x=problem.x[rows],
            run=torch.arange(len(self._draws) - num, len(self._draws), device=rows.device),
            y=problem.y[rows],
            best=problem.x[rows],
            margin=torch.full((num,), -math.inf, device=rows.device),
            count=torch.zeros(num, dtype=torch.long),
        )

    def advance(self, items: _Searches) -> Progress:
        """Answer the next query of every search."""
        candidate = self._propose(items)
        changed = (candidate != items.best).flatten(1).any(1) | (items.count == 0).to(candidate.device)
        success = torch.zeros_like(changed)
        asked = changed.nonzero()[:, 0]
        if len(asked):
            self._ask(items, candidate, asked, success)
        items.count = items.count + 1
        return Progress(items.best, items.margin, success, items.count >= self.attack.queries)

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
    def propose(self, items: _Searches, draws: Tensor, size: Tensor) -> Tensor:
        """Return one candidate per search, from its draws of this query and the size of its patch."""

    def _propose(self, items: _Searches) -> Tensor:
        first = items.count == 0
        if bool(first.all()):
            return self.start_point(items, self._starts[items.run])
        count = items.count.to(items.run.device)
        draws = self._draws[items.run, (count - 1).clamp(min=0)]
        candidate = self.propose(items, draws, self.patch[count])
        if bool(first.any()):
            new = first.nonzero()[:, 0].to(candidate.device)
            fresh = items.take(new)
            candidate[new] = self.start_point(fresh, self._starts[fresh.run])
        return candidate

    def _ask(self, items: _Searches, candidate: Tensor, asked: Tensor, success: Tensor) -> None:
        """Query the model where a candidate differs from the point at hand, and keep what is better."""
        everything = len(asked) == len(candidate)
        points, y = (candidate, items.y) if everything else (candidate[asked], items.y[asked])
        with torch.no_grad():
            logits = self.problem.search_logits(points)
        success[asked] = fooled = self.problem.fooled(points, logits, y)
        margin = self.problem.loss(logits, y).float()
        better = torch.zeros_like(success)
        better[asked] = fooled | (margin > items.margin[asked])
        items.margin[asked] = torch.where(better[asked], margin, items.margin[asked])
        items.best = torch.where(per_row(better, candidate), candidate, items.best)

    def window(self, corner: Tensor, size: Tensor) -> Tensor:
        """Return which pixels lie in the patch of each search, shape (searches, 1, height, width).

        Args:
            corner: Uniform draws for the upper left corner, shape (searches, 2).
            size: Height and width of the patches, shape (searches, 2).
        """
        top, left = (corner * (self.extent - size + 1)).long().minimum(self.extent - size)[..., None].unbind(1)
        height, width = size[..., None].unbind(1)
        in_rows = (self.rows >= top) & (self.rows < top + height)
        in_columns = (self.columns >= left) & (self.columns < left + width)
        return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


class _LinfEngine(_SquareEngine):
    """Every pixel sits on one of the two corners that ball and box leave it."""

    def __init__(self, attack: Square, problem: Problem) -> None:
        super().__init__(attack, problem)
        low, high = problem.bounds if problem.bounds is not None else (-math.inf, math.inf)
        images = problem.x.view(-1, *self.layout)
        self.low, self.high = (images - problem.eps).clamp(min=low), (images + problem.eps).clamp(max=high)

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

    def propose(self, items: _Searches, draws: Tensor, size: Tensor) -> Tensor:
        """Return the points with one square of them recoloured, per channel to the upper or the lower corner."""
        corner = torch.where(draws[:, 2:, None, None] >= 0.5, self.high[items.image], self.low[items.image])
        best = items.best.view_as(corner)
        return torch.where(self.window(draws[:, :2], size), corner, best).view_as(items.x)
