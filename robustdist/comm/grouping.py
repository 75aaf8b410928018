"""Which gradients to send together: as few messages as hide best behind the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from robustdist.errors import UsageError

__all__ = ["Cost", "Group", "Layer", "Profile", "expose", "plan_groups"]


@dataclass(frozen=True)
class Cost:
    r"""Seconds for a message: :math:`t = t_l + \text{bytes} \cdot (\rho / \beta + c)`.

    Attributes:
        latency: Seconds :math:`t_l` of a message without content, all its stages together.
        bandwidth: Bytes :math:`\beta` that a rank sends per second.
        codec: Seconds :math:`c` of encoding and decoding per byte of gradient.
        ratio: Bytes :math:`\rho` that a rank sends per byte of gradient, for example 2 (n - 1) / n / 8 for 4 bits.
    """

    latency: float
    bandwidth: float
    codec: float = 0.0
    ratio: float = 1.0

    def __call__(self, num_bytes: int) -> float:
        """Return the seconds for so many bytes of gradient."""
        return self.latency + num_bytes * (self.ratio / self.bandwidth + self.codec)


@dataclass(frozen=True)
class Layer:
    """Parameters that stay together.

    Attributes:
        names: Their names.
        ready: Seconds from the start of the backward pass until the last of their gradients is there.
        num_bytes: Size of their gradients.
    """

    names: tuple[str, ...]
    ready: float
    num_bytes: int


@dataclass(frozen=True)
class Profile:
    """One backward pass.

    Attributes:
        layers: In the order in which they are ready.
        end: Seconds until the backward pass ends.
    """

    layers: tuple[Layer, ...]
    end: float

    @classmethod
    def of_parameters(
        cls, ready: Mapping[str, float], num_bytes: Mapping[str, int], *, end: float | None = None
    ) -> Profile:
        """Put the parameters of each module together; all that comes before the last dot of a name is its module.

        Args:
            ready: Seconds from the start of the backward pass until the gradient is there, by name of parameter, the
                same numbers on all ranks.
            num_bytes: Size of the gradient, by name.
            end: Seconds until the backward pass ends, by default when the last gradient is there.

        Raises:
            UsageError: If names, times or sizes are not what they should be.

        Example:
            >>> profile = Profile.of_parameters({"a.weight": 3.0, "a.bias": 2.0, "b.weight": 1.0}, dict.fromkeys(
            ...     ["a.weight", "a.bias", "b.weight"], 8))
            >>> [(layer.names, layer.ready, layer.num_bytes) for layer in profile.layers]
            [(('b.weight',), 1.0, 8), (('a.bias', 'a.weight'), 3.0, 16)]
        """
        if set(ready) != set(num_bytes):
            raise UsageError(f"ready and num_bytes differ in {sorted(set(ready) ^ set(num_bytes))}: give both for all")
        wrong = [name for name in ready if not 0 <= ready[name] < math.inf or num_bytes[name] < 0]
        if wrong:
            raise UsageError(f"ready and num_bytes of {wrong[0]!r} must be finite and not negative")
        modules: dict[str, list[str]] = {}
        for name in sorted(ready, key=lambda name: (ready[name], name)):
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        layers = [
            Layer(tuple(names), max(ready[name] for name in names), sum(num_bytes[name] for name in names))
            for names in modules.values()
        ]
        layers.sort(key=lambda layer: (layer.ready, layer.names))
        last = layers[-1].ready if layers else 0.0
        return cls(tuple(layers), last if end is None else max(end, last))


@dataclass(frozen=True)
class Group:
    """A message and when it is under way, predicted or measured, in seconds from the start of the backward pass.

    Attributes:
        names: Parameters, in the order in which their gradients are there.
        num_bytes: Size of their gradients.
        ready: When the last gradient is there.
        begin: When work on the message begins.
        end: When its mean is there.
        exposed: Seconds for which nothing but this message is waited for.
    """

    names: tuple[str, ...]
    num_bytes: int
    ready: float
    begin: float
    end: float
    exposed: float


def expose(ends: Sequence[float], backward: float) -> list[float]:
    r"""Return how long each of several messages in a row is waited for after the backward pass has ended.

    .. math:: x_g = \max(0, \; e_g - \max(e_{\text{backward}}, e_{g-1}))

    Their sum is the time from the end of the backward pass to that of the last message.

    Args:
        ends: When each message ends, in order.
        backward: When the backward pass ends.
    """
    return [max(0.0, end - max(backward, before)) for before, end in zip([-math.inf, *ends], ends, strict=False)]


def plan_groups(profile: Profile, cost: Callable[[int], float]) -> list[Group]:
    r"""Cut the layers, in the order in which they are ready, into the groups that keep the ranks waiting least.

    One message is under way at a time, and begins when all its gradients are there and the one before is through:

    .. math:: e_g = \max(e_{g-1}, r_g) + t(\text{bytes}_g)

    with :math:`r_g` the time of the last gradient. Of all ways to cut, the one with the earliest end of the last
    message is taken, and of several such the one with the fewest messages: of what is hidden behind the backward pass
    anyway, the smallest number will do. No layer is cut.

    Args:
        profile: The backward pass, the same on all ranks, which otherwise make different groups.
        cost: Seconds for a message by its size in bytes, for example a :class:`Cost`.

    Returns:
        The groups with their predicted times; ``exposed`` sums up to all that is not hidden.

    References:
        Laanait et al., "Exascale Deep Learning for Scientific Inverse Problems", whose groups these are; the choice by
        a model of the cost is not theirs.

    Example:
        >>> profile = Profile.of_parameters({"a.w": 4.0, "b.w": 2.0, "c.w": 1.0}, {"a.w": 10, "b.w": 10, "c.w": 10})
        >>> for group in plan_groups(profile, Cost(latency=1.0, bandwidth=20.0)):
        ...     print(group.names, group.end, group.exposed)
        ('c.w', 'b.w') 4.0 0.0
        ('a.w',) 5.5 1.5
    """
    layers = profile.layers
    sizes = [0, *accumulate(layer.num_bytes for layer in layers)]

    def ends(before: Sequence[float], last: int) -> tuple[float, int]:
        """Return the earliest end of a message whose last layer is ``last``, and its first layer."""
        ready = layers[last].ready
        return min((max(before[i], ready) + cost(sizes[last + 1] - sizes[i]), i) for i in range(last + 1))

    earliest = [-math.inf]
    for last in range(len(layers)):
        earliest.append(ends(earliest, last)[0])
    # an end before that of the backward pass is as good as any other
    goal = max(earliest[-1], profile.end) * (1 + 1e-9)
    row, firsts = [-math.inf, *[math.inf] * len(layers)], list[list[int]]()
    while row[-1] > goal:  # one message more
        found = [ends(row, last) for last in range(len(layers))]
        firsts.append([first for _, first in found])
        row = [math.inf, *[end for end, _ in found]]
    return _groups(profile, cost, _cuts(firsts, len(layers)))


def _cuts(firsts: Sequence[Sequence[int]], stop: int) -> list[tuple[int, int]]:
    """Follow the choices back from the last message: the first layer of each and the one after its last."""
    cuts: list[tuple[int, int]] = []
    for row in reversed(firsts):
        cuts.append((row[stop - 1], stop))
        stop = row[stop - 1]
    return cuts[::-1]


def _groups(profile: Profile, cost: Callable[[int], float], cuts: Sequence[tuple[int, int]]) -> list[Group]:
    rows: list[tuple[tuple[str, ...], int, float, float, float]] = []
    end = -math.inf
    for first, stop in cuts:
        layers = profile.layers[first:stop]
        num_bytes, ready = sum(layer.num_bytes for layer in layers), layers[-1].ready
        begin = max(end, ready)
        end = begin + cost(num_bytes)
        rows.append((tuple(name for layer in layers for name in layer.names), num_bytes, ready, begin, end))
    exposed = expose([row[-1] for row in rows], profile.end)
    return [Group(*row, seconds) for row, seconds in zip(rows, exposed, strict=True)]
