"""Which units go, given their scores and how much is to be left."""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning.cost import CostModel
from robustdist.pruning.groups import Kind, UnitGroup
from robustdist.types import parse_number

__all__ = ["Removed", "Target", "select"]

#: Name of a group -> units that go, sorted; groups that lose nothing are missing.
Removed: TypeAlias = dict[str, list[int]]
TargetName: TypeAlias = Literal["params", "macs", "latency_ms", "width", "shape"]

#: How far under the wanted share the result may be before it is worth a warning.
_FAR = 0.2
#: Latency is measured, not computed: the search looks at this many amounts at most.
_LATENCY_LEVELS = 64


@dataclass(frozen=True)
class Target:
    """How much is to be left.

    Attributes:
        name: "params" or "macs": at most this share of the parameters or multiply-accumulates of the whole module;
            "width": this share of the units in every group; "latency_ms": at most this time; "shape": exact widths.
        value: The share in (0, 1], or milliseconds.
        shape: Kind of units -> width of every group of that kind, for "shape".
    """

    name: TargetName
    value: float = 1.0
    shape: Mapping[Kind, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, target: Mapping[str, float | int | str]) -> Target:
        """Read what users write: ``{"macs": 0.5}``, or ``{"heads": 6, "ffn": 768, "layers": 4}``.

        Raises:
            UsageError: If a name is unknown, several are mixed, or a value is out of range.
        """
        if not isinstance(target, Mapping):
            raise UsageError(f"target={target!r} must be a mapping: write {{'macs': 0.5}}, for example")
        names = set(target)
        if names and names <= set(get_args(Kind)):
            for kind, width in target.items():
                # configuration files bring 6 as 6.0
                if isinstance(width, bool) or not isinstance(width, (int, float)) or width < 0 or width % 1:
                    raise UsageError(f"target {kind}={width!r} must be a whole number of units that stay in each layer")
                if kind == "layers" and not width:
                    raise UsageError("target layers=0 would leave no layer: give the number that stays, at least 1")
            return cls("shape", shape={kind: int(target[kind]) for kind in get_args(Kind) if kind in names})
        if len(names) != 1 or not names <= {"params", "macs", "latency_ms", "width"}:
            raise UsageError(
                f"target={dict(target)!r}: give one of params, macs, width (shares that stay), latency_ms, or whole "
                "numbers of heads, ffn, hidden, channels, layers"
            )
        (name,) = names
        value = parse_number(target[name], f"target {name}")
        if not 0 < value <= (math.inf if name == "latency_ms" else 1):
            share = "milliseconds above 0" if name == "latency_ms" else "the share that stays, in (0, 1]"
            raise UsageError(f"target {name}={value:g} is out of range: give {share}")
        return cls(name, value)  # type: ignore[arg-type]


def select(
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    *,
    target: Target,
    progress: float = 1.0,
    cost: CostModel | None = None,
    latency: Callable[[Removed], float] | None = None,
    uniform: bool = False,
    round_to: int = 8,
    min_units: int = 1,
    drop_layers: bool = False,
    ignore: Sequence[str] = (),
    removed: Mapping[str, Sequence[int]] | None = None,
) -> Removed:
    r"""Choose the units with the lowest scores, ties by position, until the target is met.

    With ``uniform`` every group keeps the same share of its units; otherwise one threshold on the scores goes for all
    groups. The amount is the smallest that meets the target, found by bisection. The result is a function of the
    arguments alone, and more progress or a smaller target removes the same units and more.

    Args:
        groups: All groups.
        scores: Name of a group -> shape (size,), larger for units that should stay.
        target: What is to be left.
        progress: How much of the way to the target, in [0, 1]: what is left is :math:`1 - progress \, (1 - target)`.
        cost: For params and macs.
        latency: For latency_ms: measures milliseconds after a removal; called about ten times.
        uniform: Whether all groups keep the same share. "width" and "shape" always go group by group.
        round_to: Widths are multiples of it, in groups with more units; not heads or layers, not exact shapes.
        min_units: Units that stay in every group at least (of exact shapes: that may be asked for).
        drop_layers: Whether a group may lose all its units, with ``min_units=0``.
        ignore: Patterns as in file names; groups whose names match stay whole.
        removed: Units that are gone already; they are in the result.

    Raises:
        UsageError: If the target cannot be reached, with the value that can; if a shape does not fit a group; if a
            group would lose all units; if scores are no numbers.
    """
    if not 0 <= progress <= 1:
        raise UsageError(f"progress={progress} is out of range: give a number in [0, 1]")
    chooser = _Chooser(groups, scores, round_to, min_units, ignore, removed or {})
    if target.name == "shape":
        result = chooser.cut(chooser.shaped(target.shape, progress))
    elif target.name == "width":
        result = chooser.cut(chooser.shares(1 - progress * (1 - target.value)))
    else:
        levels = chooser.uniform_levels() if uniform else chooser.global_levels()
        result = _search(chooser, levels, _measure(target, cost, latency), target, progress)
    for group in groups:
        if len(result.get(group.name, ())) == group.size and not drop_layers:
            raise UsageError(
                f"group {group.name}: all {group.size} {group.kind} would go; raise the target or min_units, or put "
                "the group into ignore"
            )
    return result


@dataclass(frozen=True)
class _Levels:
    """Amounts of removal, from none to all that may go: how many there are, and the widths of each."""

    count: int
    widths: Callable[[int], dict[str, int]]


class _Chooser:
    """Widths of groups, and the units that go for given widths."""

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        scores: Mapping[str, Tensor],
        round_to: int,
        min_units: int,
        ignore: Sequence[str],
        removed: Mapping[str, Sequence[int]],
    ) -> None:
        self.before = {name: sorted(units) for name, units in removed.items() if len(units)}
        self.groups = [
            group for group in groups if not any(fnmatch.fnmatchcase(group.name, pattern) for pattern in ignore)
        ]
        self.step = {group.name: _step(group, round_to) for group in self.groups}
        self.floor = {}
        #: Units of each group in the order in which they go, those that are gone first, without those that are locked.
        self.order: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        for group in self.groups:
            values = _checked(group, scores[group.name]).clone()
            values[list(self.before.get(group.name, ()))] = -math.inf
            order = torch.sort(values, stable=True).indices.tolist()
            self.order[group.name] = [unit for unit in order if unit not in group.locked]
            self.scores[group.name] = values.tolist()
            self.floor[group.name] = max(min(min_units, group.size), len(group.locked))

    def cut(self, widths: Mapping[str, int]) -> Removed:
        """The units that go when groups keep ``widths``; what was gone stays gone."""
        result = dict(self.before)
        for group in self.groups:
            gone = max(group.size - widths[group.name], len(self.before.get(group.name, ())))
            if gone:
                result[group.name] = sorted(self.order[group.name][:gone])
        return result

    def rounded(self, group: UnitGroup, width: float) -> int:
        """The width that a group can have, nearest to ``width``; halves go up."""
        step, floor = self.step[group.name], self.floor[group.name]
        lowest = min(math.ceil(floor / step) * step, group.size)
        return max(min(math.floor(width / step + 0.5) * step, group.size), lowest)

    def shares(self, share: float) -> dict[str, int]:
        """Widths when every group keeps ``share`` of its units."""
        return {group.name: self.rounded(group, share * group.size) for group in self.groups}

    def shaped(self, shape: Mapping[Kind, int], progress: float) -> dict[str, int]:
        """Widths on the way to an exact shape; at the end exactly that."""
        for kind in shape:
            if not any(group.kind == kind for group in self.groups):
                raise UsageError(f"target {kind}={shape[kind]}: the model has no group of {kind}; leave {kind} out")
        widths = {}
        for group in self.groups:
            width = shape.get(group.kind, group.size)
            left = group.size - len(self.before.get(group.name, ()))
            least = max(len(group.locked), 1 if group.layers else 0)
            if group.kind in shape and not least <= width <= left:
                raise UsageError(
                    f"target {group.kind}={width} does not fit group {group.name}, which can have {least} to {left}: "
                    "change it, or put the group into ignore"
                )
            widths[group.name] = group.size - math.floor(progress * (group.size - width) + 0.5)
        return widths

    def uniform_levels(self) -> _Levels:
        """All widths of the form share times size, widest first."""
        sizes = {group.size for group in self.groups}
        shares = sorted({kept / size for size in sizes for kept in range(size + 1)}, reverse=True)
        return _Levels(len(shares), lambda level: self.shares(shares[level]))

    def global_levels(self) -> _Levels:
        """Widths when the first n units of all groups in the order of their scores go, for every n."""
        ranking = sorted(
            (self.scores[group.name][unit], place, number)
            for place, group in enumerate(self.groups)
            for number, unit in enumerate(self.order[group.name])
        )

        def widths(level: int) -> dict[str, int]:
            gone = Counter(place for _, place, _ in ranking[:level])
            return {
                group.name: self.rounded(group, group.size - gone[place]) for place, group in enumerate(self.groups)
            }

        return _Levels(len(ranking) + 1, widths)


def _step(group: UnitGroup, round_to: int) -> int:
    if round_to < 1:
        raise UsageError(f"round_to={round_to} must be at least 1")
    return round_to if group.kind not in ("heads", "layers") and group.size > round_to else 1


def _checked(group: UnitGroup, scores: Tensor) -> Tensor:
    scores = scores.detach().double().cpu()
    if scores.shape != (group.size,) or not bool(torch.isfinite(scores).all()):
        raise UsageError(
            f"scores of group {group.name} must be {group.size} finite numbers, not {tuple(scores.shape)} with "
            f"{int((~torch.isfinite(scores)).sum())} that are none: look for NaN or inf in weights and gradients"
        )
    return scores


def _measure(
    target: Target, cost: CostModel | None, latency: Callable[[Removed], float] | None
) -> Callable[[Removed], float]:
    if target.name == "latency_ms":
        if latency is None:
            raise UsageError("target latency_ms needs latency=, a function that measures a removal: give it")
        return latency
    if cost is None:
        raise UsageError(f"target {target.name} needs cost=, a CostModel of the module: give it")
    name, model = target.name, cost
    dense = getattr(model.dense, name)
    if not dense:
        raise UsageError(f"target {name}: the model has no {name} that were counted; give CostModel a forward")
    return lambda removed: float(getattr(model.of(removed), name) / dense)


def _search(
    chooser: _Chooser,
    levels: _Levels,
    measure: Callable[[Removed], float],
    target: Target,
    progress: float,
) -> Removed:
    """The first level that meets the target."""
    start = measure({}) if target.name == "latency_ms" and progress < 1 else 1.0
    wanted = start + progress * (target.value - start) if progress < 1 else target.value
    places: Sequence[int] = range(levels.count)
    if target.name == "latency_ms":
        stride = max(1, math.ceil((levels.count - 1) / _LATENCY_LEVELS))
        places = [*range(0, levels.count - 1, stride), levels.count - 1]
    low, high = 0, len(places) - 1
    reachable = measure(chooser.cut(levels.widths(places[high])))
    # shares are quotients of whole numbers: equal ones must not differ by rounding
    wanted += 1e-12 * wanted
    if reachable > wanted:
        raise UsageError(
            f"target {target.name}={wanted:.4g} cannot be reached: with everything removed that may be, "
            f"{reachable:.4g} is left; raise the target, or lower min_units, round_to or ignore"
        )
    while low < high:
        middle = (low + high) // 2
        if measure(chooser.cut(levels.widths(places[middle]))) <= wanted:
            high = middle
        else:
            low = middle + 1
    result = chooser.cut(levels.widths(places[high]))
    if progress == 1:
        _warn_if_far(target, wanted, measure, result)
    return result


def _warn_if_far(target: Target, wanted: float, measure: Callable[[Removed], float], result: Removed) -> None:
    if target.name == "latency_ms":
        return
    found = measure(result)
    if found < wanted - _FAR:
        warnings.warn(
            f"target {target.name}={wanted:.3g}: the next size below it is {found:.3g}; a smaller round_to than the "
            "present one, or uniform=False, comes closer",
            RobustDistWarning,
            stacklevel=4,
        )
