"""The images that an evaluation is examined on, and the verdicts of attacks on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.core.forward import guarded_logits

__all__ = ["Part", "Subset"]


@dataclass
class Part:
    """Images that share a forward function.

    Attributes:
        forward: Maps inputs to logits.
        x: Inputs, shape (n, ...).
        y: Class indices, shape (n,).
        ids: One integer per image, for the random draws.
        held: Which images those attacks of the evaluation left right that share one threat model, shape (n,), bool.
        own: Which images this process judges, shape (n,), bool; the others only teach the substitute.
        whole: Whether all rows must stay together, because ``forward`` reads the rest of their batch.
    """

    forward: Callable[[Tensor], Any]
    x: Tensor
    y: Tensor
    ids: list[int]
    held: Tensor
    own: Tensor
    whole: bool = False


@dataclass
class Subset:
    """All parts of one process.

    Attributes:
        module: The module that is judged.
        parts: The images.
        batch_size: Images per forward and backward pass.
    """

    module: nn.Module
    parts: list[Part]
    batch_size: int
    clean: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.clean = [self._logits(part, part.x).argmax(1) == part.y for part in self.parts]

    def own(self, values: list[Tensor]) -> Tensor:
        """Return the entries of this process's images, in one tensor on the CPU."""
        chosen = [value.cpu()[part.own] for value, part in zip(values, self.parts, strict=True)]
        return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.bool)

    def verdicts(self, attack: Attack, victim: nn.Module | None = None, among: Tensor | None = None) -> Tensor:
        """Return which own images are right without attack and under ``attack``, shape (own images,), bool.

        Args:
            attack: The attack.
            victim: The module that the attack sees; default the judged one. Its results are judged by the latter.
            among: Which own images to attack; the others count as wrong.
        """
        right, start = [], 0
        for part, clean in zip(self.parts, self.clean, strict=True):
            held = torch.zeros(len(part.x), dtype=torch.bool)
            wanted = part.own & clean.cpu()
            if among is not None:
                count = int(part.own.sum())
                wanted[part.own.nonzero()[:, 0]] &= among[start : start + count]
                start += count
            for rows in self._chunks(part, wanted):
                x_adv = self._attacked(attack, part, rows, victim)[0]
                held[rows] = (self._logits(part, x_adv).argmax(1) == part.y[rows.to(part.y.device)]).cpu()
            right.append(held & wanted)
        return self.own(right)

    def without_gradient(self, attack: Attack) -> Tensor:
        """Return on which own images that are right without attack ``attack`` finds no input gradient."""
        found = []
        for part, clean in zip(self.parts, self.clean, strict=True):
            blind = torch.zeros(len(part.x), dtype=torch.bool)
            wanted = part.own & clean.cpu()
            for rows in self._chunks(part, wanted):
                blind[rows] = self._attacked(attack, part, rows, None)[1].cpu()
            found.append(blind & wanted)
        return self.own(found)

    def _chunks(self, part: Part, wanted: Tensor) -> Iterator[Tensor]:
        if not wanted.any():
            return
        if part.whole:
            yield torch.arange(len(part.x))
            return
        yield from torch.split(wanted.nonzero()[:, 0], self.batch_size)

    def _attacked(self, attack: Attack, part: Part, rows: Tensor, victim: nn.Module | None) -> tuple[Tensor, Tensor]:
        on_device = rows.to(part.x.device)
        found = attack.run(
            self.module if victim is None else victim,
            part.x[on_device],
            part.y[on_device],
            forward=part.forward if victim is None else None,
            sample_ids=[part.ids[row] for row in rows.tolist()],
            rowwise=not part.whole,
        )
        return found.x_adv, found.no_gradient

    def _logits(self, part: Part, x: Tensor) -> Tensor:
        if part.whole:
            return guarded_logits(self.module, part.forward, x)
        chunks = torch.split(x, self.batch_size)
        return torch.cat([guarded_logits(self.module, part.forward, chunk) for chunk in chunks])
