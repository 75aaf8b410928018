"""Keep batches full: run items (image, target, restart) side by side, and let all items of a broken image leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from robustdist.attacks.problem import Problem

__all__ = ["Engine", "Found", "Items", "Progress", "batch_places", "run_queue"]

# Share of the places that must be free before new items are let in: joining copies the whole state.
_REFILL_SHARE = 0.125
# Larger batches make an item no cheaper on a CPU, and those that leave its caches behind dearer; small nets want them
# large, as each round of a search costs a millisecond of its own.
_CPU_BATCH = 128

State = TypeVar("State", bound="Items")


@dataclass
class Items:
    """State of the items in one batch; every field is a tensor with one entry per item, on any device.

    Attributes:
        image: Row of the problem that the item is about.
        x: Clean inputs.
    """

    image: Tensor
    x: Tensor

    def take(self: State, index: Tensor) -> State:
        """Return the items at ``index``."""
        return type(self)(**{name: value[index.to(value.device)] for name, value in self._fields()})

    def join(self: State, other: State) -> State:
        """Return these items followed by ``other``."""
        return type(self)(**{name: torch.cat([value, getattr(other, name)]) for name, value in self._fields()})

    def _fields(self) -> list[tuple[str, Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


class Progress(NamedTuple):
    """What one advance brought, one entry per item.

    Attributes:
        point: Candidates for the result.
        loss: How bad they are for the model; compared within one image.
        success: Whether a candidate fools the model.
        done: Whether the item has come to its end, on the CPU.
    """

    point: Tensor
    loss: Tensor
    success: Tensor
    done: Tensor


class Engine(ABC, Generic[State]):
    """One attack as a machine: ``start`` makes items, ``advance`` moves each of them by one step."""

    #: Number of targets times restarts: every image is attacked once per group, in this order.
    num_groups: int

    @abstractmethod
    def start(self, rows: Tensor, group: int) -> State:
        """Return new items for these rows of the problem; their draws depend on row and group alone."""

    @abstractmethod
    def advance(self, items: State) -> Progress:
        """Move ``items`` in place by one step; items do not see each other."""


class Found:
    """The worst candidate per image so far: a success before any failure, then the larger loss.

    Attributes:
        x_adv: The candidates, at first the clean inputs.
        success: Whether they fool the model.
    """

    def __init__(self, problem: Problem) -> None:
        self.x_adv = problem.x.clone()
        self.success = torch.zeros(len(problem.x), dtype=torch.bool)
        self._loss = torch.full((len(problem.x),), -torch.inf, dtype=torch.float64)

    def offer(self, image: Tensor, progress: Progress, candidates: Tensor) -> None:
        """Take over those candidates that are worse; ``candidates`` are indices of items, on the CPU."""
        picked = candidates.to(progress.loss.device)
        losses, successes = progress.loss[picked].tolist(), progress.success[picked].tolist()
        chosen: dict[int, int] = {}
        for place, row, loss, success in zip(
            candidates.tolist(), image[candidates].tolist(), losses, successes, strict=True
        ):
            before = bool(self.success[row])
            if (success, loss) > (before, float(self._loss[row])):
                self.success[row], self._loss[row] = success, loss
                chosen[row] = place
        if chosen:
            device = self.x_adv.device
            rows, places = torch.tensor(list(chosen)), torch.tensor(list(chosen.values()))
            self.x_adv[rows.to(device)] = progress.point[places.to(device)]


def batch_places(problem: Problem, batch_size: int | None) -> int:
    """Return the largest number of items in one forward pass; ``batch_size`` as for :func:`run_queue`."""
    if not problem.rowwise:
        return len(problem.x)
    # memory was enough for the call, so places of images that an earlier attack broke are free for more targets
    largest = problem.call_size or len(problem.x)
    return batch_size or (min(largest, _CPU_BATCH) if problem.x.device.type == "cpu" else largest)


def run_queue(problem: Problem, engine: Engine[State], *, batch_size: int | None = None, drop: bool = True) -> Found:
    """Run every group of ``engine`` on every image, in batches of at most ``batch_size`` items.

    Items are let in target by target. With ``drop`` all items of an image leave as soon as one of them succeeds, and
    those still waiting are never started, so later targets and restarts see survivors only. Rows being independent,
    neither this nor the company in a batch changes what another image's items find. A forward pass that reads the
    whole batch gets all images of one group together, in order, to the end.

    Args:
        problem: The attack call.
        engine: The attack.
        batch_size: Largest number of items in a batch; None for the number of images in the call, on a CPU at
            most 128.
        drop: Whether to leave out images that are broken.
    """
    num_images = len(problem.x)
    found = Found(problem)
    capacity = batch_places(problem, batch_size)
    drop = drop and problem.rowwise
    waiting = deque((group, row) for group in range(engine.num_groups) for row in range(num_images))
    items: State | None = None
    while True:
        present = 0 if items is None else len(items.image)
        free = capacity - present
        # without rowwise a batch is one group and nothing else
        if waiting and (present == 0 or (free >= max(1, _REFILL_SHARE * capacity) and problem.rowwise)):
            items = _refill(items, waiting, engine, found, free, drop, problem.x.device)
        if items is None:
            return found
        progress = engine.advance(items)
        success = progress.success.cpu()
        candidates = (success | progress.done).nonzero()[:, 0]
        if len(candidates) == 0:
            continue
        image = items.image.cpu()
        found.offer(image, progress, candidates)
        leaving = progress.done | found.success[image] if drop else progress.done
        if leaving.any():
            staying = (~leaving).nonzero()[:, 0]
            items = items.take(staying) if len(staying) else None


def _refill(
    items: State | None,
    waiting: deque[tuple[int, int]],
    engine: Engine[State],
    found: Found,
    free: int,
    drop: bool,
    device: torch.device,
) -> State | None:
    """Return ``items`` with up to ``free`` new ones behind them."""
    fallen = found.success.tolist()
    by_group: dict[int, list[int]] = {}
    while waiting and free:
        group, row = waiting.popleft()
        if not (drop and fallen[row]):
            by_group.setdefault(group, []).append(row)
            free -= 1
    for group, rows in by_group.items():
        new = engine.start(torch.tensor(rows, device=device), group)
        items = new if items is None else items.join(new)
    return items
