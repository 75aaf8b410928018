"""What became of each image: one row of integers per image, the source of every count in a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from robustdist.report.result import ClassScore, Step

__all__ = ["NO_STAGE", "Records"]

#: Stage of an image that no stage of an attack broke.
NO_STAGE = -1

_FIXED = ("loader", "id", "digest", "label", "prediction")
_PER_ATTACK = ("held", "stage", "blind")


class Records:
    """A table with one row per image.

    Columns: ``loader`` and ``id`` say which image it is, ``digest`` what it looked like (0 where nobody asked),
    ``label`` and ``prediction`` are class indices. Per attack follow ``held`` (1 if the image was right without attack
    and under this one), ``stage`` (place in the attack's stages of the one that broke it, -1 for none) and ``blind``
    (1 if the attack was run and had no input gradient to follow).

    Args:
        attacks: Names of the stages by name of the attack; empty for an attack that has none.
    """

    def __init__(self, attacks: Mapping[str, Sequence[str]]) -> None:
        self.attacks = {name: tuple(stages) for name, stages in attacks.items()}
        self.columns = (*_FIXED, *(f"{name}/{column}" for name in self.attacks for column in _PER_ATTACK))
        self._parts: list[Tensor] = []

    def new_rows(self, count: int) -> Tensor:
        """Return ``count`` rows of images that nobody attacked: nothing held, no stage; shape (count, columns)."""
        rows = torch.zeros(count, len(self.columns), dtype=torch.int64)
        for name in self.attacks:
            rows[:, self.place(name, "stage")] = NO_STAGE
        return rows

    def place(self, name: str, column: str | None = None) -> int:
        """Return the place of a column: ``place("label")``, ``place("pgd20", "held")``."""
        return self.columns.index(name if column is None else f"{name}/{column}")

    def add(self, rows: Tensor) -> None:
        """Append rows as :meth:`new_rows` lays them out."""
        self._parts.append(rows)

    def merge(self, tables: Iterable[Tensor]) -> None:
        """Become the union of ``tables``: sorted by loader and id, each image once (the first row of it counts)."""
        together = torch.cat([self.new_rows(0), *tables])
        seen: dict[tuple[int, int], int] = {}
        for row, (loader, sample_id) in enumerate(together[:, :2].tolist()):
            seen.setdefault((loader, sample_id), row)
        self._parts = [together[[seen[key] for key in sorted(seen)]]]

    @property
    def table(self) -> Tensor:
        """All rows, shape (images, columns), int64."""
        if len(self._parts) != 1:
            self._parts = [torch.cat([self.new_rows(0), *self._parts])]
        return self._parts[0]

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str, column: str | None = None) -> Tensor:
        """Return one column, shape (images,); names as in :meth:`place`."""
        return self.table[:, self.place(name, column)]

    @property
    def clean(self) -> Tensor:
        """Which images are right without attack, shape (images,), bool."""
        return self.column("label") == self.column("prediction")

    def held(self, name: str) -> Tensor:
        """Return which images stay right under one attack, shape (images,), bool."""
        return self.column(name, "held").bool()

    @property
    def robust(self) -> Tensor:
        """Which images are right without attack and under every attack, shape (images,), bool."""
        return self.robust_under(self.attacks)

    def robust_under(self, names: Iterable[str]) -> Tensor:
        """Return which images are right without attack and under each of some attacks, shape (images,), bool."""
        robust = self.clean
        for name in names:
            robust = robust & self.held(name)
        return robust

    def classes(self) -> list[ClassScore]:
        """Return the counts of each class that occurs, in the order of labels."""
        return self._scores(self.column("label"))

    def loaders(self) -> list[ClassScore]:
        """Return the counts of each loader that had images, in order; ``label`` is its place."""
        return self._scores(self.column("loader"))

    def _scores(self, groups: Tensor) -> list[ClassScore]:
        clean, robust = self.clean, self.robust
        return [
            ClassScore(value, int(mine.sum()), int((clean & mine).sum()), int((robust & mine).sum()))
            for value in sorted(set(groups.tolist()))
            for mine in [groups == value]
        ]

    def waterfall(self) -> list[Step]:
        """Return how many images are still right after each attack, in order, and within one after each of its stages.

        An image falls at the first step that broke it; the last step equals the robust count.
        """
        standing = self.clean
        steps = [Step("clean", int(standing.sum()))]
        for name, stages in self.attacks.items():
            held, stage = self.held(name), self.column(name, "stage")
            # the last stage is written as the whole attack: what fell to it without a stage must not be missed
            for place, title in enumerate(stages[:-1]):
                left = standing & ~((stage != NO_STAGE) & (stage <= place) & ~held)
                steps.append(Step(f"{name}: {title}", int(left.sum())))
            standing = standing & held
            steps.append(Step(f"{name}: {stages[-1]}" if stages else name, int(standing.sum())))
        return steps
