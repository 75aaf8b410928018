"""Both ends of an exchange: where its elements come from, and where the means go."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Ends", "Owner", "Whole"]


class Ends(Protocol):
    """Where the elements of an exchange come from and where their means go, a part at a time.

    Attributes:
        keeps: Whether :meth:`keep` is of any use.
    """

    keeps: bool

    def load(self, begin: int, length: int) -> Tensor:
        """Return flat float32 elements, valid until the next call; called once for each part, in order."""

    def fill(self, begin: int, value: Tensor) -> None:
        """Set elements of a part that stand for nothing to what does not count in a block."""

    def keep(self, begin: int, value: Tensor, sent: Tensor) -> None:
        """See what was encoded and what all ranks decode of it; both may be used as work space."""

    def store(self, begin: int, mean: Tensor) -> None:
        """Take means, valid during the call."""


class Whole:
    """Ends that are tensors: the mean of ``x`` goes to ``out``, and what all ranks decode of ``x`` to ``sent``."""

    def __init__(self, x: Tensor, out: Tensor, sent: Tensor | None = None) -> None:
        self.x, self.out, self.sent = x, out, sent
        self.keeps = sent is not None

    def load(self, begin: int, length: int) -> Tensor:
        """Return a view."""
        return self.x[begin : begin + length]

    def fill(self, begin: int, value: Tensor) -> None:
        """Leave all as it is."""

    def keep(self, begin: int, value: Tensor, sent: Tensor) -> None:
        """Copy."""
        if self.sent is not None:
            self.sent[begin : begin + len(sent)].copy_(sent)

    def store(self, begin: int, mean: Tensor) -> None:
        """Copy."""
        self.out[begin : begin + len(mean)].copy_(mean)


class Owner(Protocol):
    """What the rank that averages a chunk does around its second encoding: error feedback of its own."""

    def open(self, begin: int, length: int) -> None:
        """Begin with the chunk of ``length`` elements from ``begin``."""

    def prepare(self, begin: int, mean: Tensor) -> None:
        """Change a part of the mean in place before it is encoded."""

    def update(self, begin: int, mean: Tensor, sent: Tensor) -> None:
        """See what was encoded and what everybody decodes; both may be changed."""
