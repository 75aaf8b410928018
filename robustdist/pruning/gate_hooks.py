"""Hooks in front of every layer that reads a unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from robustdist.core.compiled import forget_compiled
from robustdist.errors import UsageError
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.importance import distinct, named_tensors
from robustdist.pruning.layers import DIRECT

__all__ = ["GateHooks"]

H = TypeVar("H", bound="GateHooks")


class GateHooks(ABC):
    """Forward pre-hooks on every layer that reads a unit; what they do is up to the subclass.

    Args:
        module: The dense module. Attention of torch's own class does not call its output layer: its class has to be
            changed first, as for a removal.
        groups: Groups of units of ``module``.
    """

    def __init__(self, module: nn.Module, groups: Sequence[UnitGroup]) -> None:
        self._module, self._groups = module, list(groups)
        self._handles: list[Any] = []
        #: Whether the hooks do anything; those in copies of the module ask too.
        self.installed = False
        #: Groups that a forward pass has come by.
        self.reached: set[str] = set()

    @abstractmethod
    def multiplied(self, x: Tensor, group: str, units: Tensor, axis: int) -> Tensor:
        """Return ``x`` behind its gates.

        Args:
            x: Input of a layer.
            group: Name of the group.
            units: Unit of every entry along ``axis``, -1 for none.
            axis: Counted from behind.
        """

    def install(self: H) -> H:
        """Put the gates in front of the layers; once."""
        if not self.installed:
            places = [place for group in self._groups for place in _gates_of(self, self._module, group)]
            self._handles = [part.register_forward_pre_hook(gate, with_kwargs=True) for part, gate in places]
            self.installed = True
            if self._handles:
                forget_compiled(self._module)
        return self

    def remove(self) -> None:
        """Take the gates away, also out of effect in copies of the module."""
        self.installed = False
        if self._handles:
            forget_compiled(self._module)
        while self._handles:
            self._handles.pop().remove()

    def check_reached(self) -> None:
        """Refuse groups that no forward pass has ever come by.

        Raises:
            UsageError: Naming the group.
        """
        missing = [group for group in self._groups if group.name not in self.reached]
        if missing:
            readers = ", ".join([member.tensor for member in missing[0].consumers] or missing[0].layers) or "no layer"
            raise UsageError(
                f"group {missing[0].name} is read by {readers}, which no forward pass has called as a layer: put the "
                "group into ignore"
            )


class _Gate:
    """Forward pre-hook of one layer for one group."""

    def __init__(self, gates: GateHooks, group: UnitGroup, units: Tensor, axis: int, names: tuple[str, ...]) -> None:
        self.gates, self.group, self.units, self.axis, self.names = gates, group.name, units, axis, names

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return self

    def __call__(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.gates.installed:
            return None
        self.gates.reached.add(self.group)
        done: dict[int, Tensor] = {}  # attention asks whether query, key and value are one and the same

        def gated(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in done:
                done[id(x)] = self.gates.multiplied(x, self.group, self.units, self.axis)
            return done[id(x)]

        count = len(self.names)
        args = (*(gated(x) for x in args[:count]), *args[count:])
        return args, {name: gated(value) if name in self.names else value for name, value in kwargs.items()}


def _gates_of(gates: GateHooks, module: nn.Module, group: UnitGroup) -> Iterator[tuple[nn.Module, _Gate]]:
    """All layers that hold a weight which reads the group, a shared layer once, layers with a shared weight each."""
    for member, weight in distinct(group.consumers, named_tensors(module)):
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter is weight:
                    yield part, _gate(gates, group, member, part, name, weight)


def _gate(gates: GateHooks, group: UnitGroup, member: Member, part: nn.Module, name: str, weight: Tensor) -> _Gate:
    names: tuple[str, ...] = ("input",)
    if isinstance(part, nn.MultiheadAttention):
        names = ("query", "key", "value")
        if name != "in_proj_weight":
            raise UsageError(
                f"group {group.name} is read by {member.tensor}, one of three weights of nn.MultiheadAttention: put "
                "the group into ignore"
            )
    repeats = part.groups if isinstance(part, DIRECT) and member.dim == 1 else 1
    # channels stand before the positions of a convolution, and last elsewhere
    return _Gate(gates, group, member.units.repeat(repeats), min(1 - weight.dim(), -1), names)
