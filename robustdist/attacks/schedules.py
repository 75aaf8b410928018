"""How a radius or a step size grows while training goes on.

A schedule maps progress in [0, 1] (executed optimiser steps over all of them) to a factor on the full value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from robustdist.errors import UsageError

__all__ = ["LinearRamp", "Piecewise", "Schedule"]


class Schedule(ABC):
    """Maps progress in [0, 1] to a factor that is not negative."""

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Return the factor at ``progress``."""


class LinearRamp(Schedule):
    """Grow linearly from ``start`` to 1 over the first ``share`` of training, then stay.

    Large radii need it: with eps 0.3 from the first step, training on MNIST often ends in a constant classifier.

    Args:
        share: Share of all optimiser steps over which the ramp runs, in (0, 1].
        start: Factor at the first step, in [0, 1].

    Example:
        >>> ramp = LinearRamp(share=0.5)
        >>> ramp(0.0), ramp(0.25), ramp(0.9)
        (0.0, 0.5, 1.0)
    """

    def __init__(self, share: float = 0.3, start: float = 0.0) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"share={share} must be in (0, 1]: it is the share of training over which the ramp runs")
        if not 0 <= start <= 1:
            raise UsageError(f"start={start} must be in [0, 1]: it is the factor at the first step")
        self.share = share
        self.start = start

    def __call__(self, progress: float) -> float:
        """Return the factor at ``progress``."""
        return min(1.0, self.start + (1.0 - self.start) * progress / self.share)


class Piecewise(Schedule):
    """Interpolate linearly between points.

    Args:
        points: Pairs (progress, factor) in rising order of progress; constant before the first and after the last.

    Example:
        >>> Piecewise([(0.0, 0.5), (0.5, 1.0)])(0.25)
        0.75
    """

    def __init__(self, points: list[tuple[float, float]]) -> None:
        places = [place for place, _ in points]
        if not points or places != sorted(set(places)) or not all(0 <= factor < math.inf for _, factor in points):
            raise UsageError(f"points={points} must be (progress, factor) pairs with rising progress and factors >= 0")
        self.points = [(float(place), float(factor)) for place, factor in points]

    def __call__(self, progress: float) -> float:
        """Return the factor at ``progress``."""
        previous = self.points[0]
        if progress <= previous[0]:
            return previous[1]
        for place, factor in self.points[1:]:
            if progress <= place:
                weight = (progress - previous[0]) / (place - previous[0])
                return previous[1] + weight * (factor - previous[1])
            previous = (place, factor)
        return previous[1]
