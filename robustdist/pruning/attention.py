"""Blocks that take the place of others when their heads, or the whole of them, go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from robustdist.errors import UsageError

__all__ = ["PassThrough", "slim"]


class PassThrough(nn.Module):
    """Takes the place of a dropped block: returns the first argument, so that the other blocks keep their names."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``x``."""
        return x


def slim(module: nn.Module) -> Callable[[], None]:
    """Give ``module`` a class whose heads can go; returns what takes that back.

    Raises:
        UsageError: If there is none for it.
    """
    raise UsageError(f"the heads of {type(module).__name__} cannot go: put the group into ignore")
