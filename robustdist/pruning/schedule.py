"""How much of the way to the target is gone at which point of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from robustdist.errors import UsageError

__all__ = ["PruningSchedule", "ScheduleKind"]

ScheduleKind: TypeAlias = Literal["one_shot", "iterative", "cubic"]


@dataclass(frozen=True)
class PruningSchedule:
    r"""Share of the removal that is due, from 0 to 1.

    ``one_shot``: all of it at ``start``. ``iterative``: equal parts, ``rounds`` of them. ``cubic``: large parts first,

    .. math:: s(t) = 1 - \left(1 - \frac{t - t_0}{t_1 - t_0}\right)^3

    Attributes:
        kind: The form.
        start: :math:`t_0`, share of the training's optimiser steps where the way begins; 0 is before the first step.
        end: :math:`t_1`, share where it ends; not of ``one_shot``.
        rounds: In how many parts the way is gone, each at the end of its part; at least 1; not of ``one_shot``.

    References:
        Zhu and Gupta, "To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model Compression".

    Example:
        >>> schedule = PruningSchedule("cubic", start=0.1, end=0.6, rounds=2)
        >>> [schedule.progress(at) for at in (0.05, 0.1, 0.4, 0.6)]
        [0.0, 0.0, 0.875, 1.0]
    """

    kind: ScheduleKind = "one_shot"
    start: float = 0.1
    end: float = 0.6
    rounds: int = 10

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise UsageError(f"schedule.kind={self.kind!r} is unknown: use one of {', '.join(get_args(ScheduleKind))}")
        if not 0 <= self.start < 1:
            raise UsageError(f"schedule.start={self.start} is out of range: give a share of the training in [0, 1)")
        if self.kind != "one_shot" and not self.start < self.end <= 1:
            raise UsageError(f"schedule.end={self.end} is out of range: give a share in ({self.start}, 1]")
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise UsageError(f"schedule.rounds={self.rounds!r} must be a whole number, at least 1")

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> PruningSchedule:
        """Read what users write, ``{"kind": "cubic", "start": 0.1, "end": 0.6}``.

        Raises:
            UsageError: If an option is unknown or out of range.
        """
        if options is not None and not isinstance(options, Mapping):
            raise UsageError(f"schedule={options!r} must be a mapping: write {{'kind': 'cubic'}}, for example")
        options = dict(options or {})
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UsageError(f"schedule has no option {unknown[0]!r}: it has {', '.join(known)}")
        return cls(**options)

    def progress(self, at: float) -> float:
        """Return the share of the removal that is due once ``at`` of the training, in [0, 1], is done."""
        if at < self.start:
            return 0.0
        if self.kind == "one_shot" or at >= self.end:
            return 1.0
        # rounding: 3 of 10 rounds are at 0.3 of the way, which floats may miss
        share = math.floor((at - self.start) / (self.end - self.start) * self.rounds + 1e-9) / self.rounds
        return share if self.kind == "iterative" else 1 - (1 - share) ** 3
