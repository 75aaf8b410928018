"""What is removed together: units, and the places in tensors that vanish with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Kind", "Member", "Role", "UnitAttribute", "UnitGroup", "kept_indices"]

Kind: TypeAlias = Literal["channels", "heads", "ffn", "hidden", "layers"]
#: producer: rows that make a unit; consumer: columns that read it; norm: scale, shift, statistics per unit.
Role: TypeAlias = Literal["producer", "consumer", "norm"]


@dataclass(frozen=True, eq=False)
class Member:
    """One dimension of one tensor, some indices of which vanish with units of a group.

    Attributes:
        tensor: Name of a parameter or buffer, as in ``state_dict``.
        dim: The dimension.
        units: int64 of shape (size of the dimension,): the unit each index belongs to, -1 for none of this group.
        role: What the tensor is to the unit.
    """

    tensor: str
    dim: int
    units: Tensor
    role: Role


@dataclass(frozen=True)
class UnitAttribute:
    """An integer attribute that counts units: ``per_unit`` times the number that is left.

    Attributes:
        module: Path of the module that has it.
        name: Name of the attribute.
        per_unit: Its value for one unit, for example ``head_dim`` for ``all_head_size``.
    """

    module: str
    name: str
    per_unit: int = 1


@dataclass(frozen=True, eq=False)
class UnitGroup:
    """Units that can be removed one by one, each from all members at once.

    Attributes:
        name: Stable and unique: the path of the layer that makes the units, for example ``layer1.0.conv1``.
        kind: What a unit is.
        size: Number of units, at least 1.
        members: The places that vanish with them.
        attributes: Attributes to count anew after a removal.
        swaps: Paths of ``nn.MultiheadAttention`` modules that have to change their class before units can go.
    """

    name: str
    kind: Kind
    size: int
    members: tuple[Member, ...]
    attributes: tuple[UnitAttribute, ...] = ()
    swaps: tuple[str, ...] = ()
    #: Units that may never go, for example those a frozen layer fixes.
    locked: frozenset[int] = field(default_factory=frozenset)
    #: Of kind "layers", which has no members: the path of the block that each unit is.
    layers: tuple[str, ...] = ()

    @property
    def consumers(self) -> tuple[Member, ...]:
        """Members that read the units."""
        return tuple(member for member in self.members if member.role == "consumer")

    def kept(self, removed: Iterable[int]) -> Iterator[tuple[Member, Tensor]]:
        """Yield every member with a bool tensor over its dimension: True where the index stays."""
        gone = torch.zeros(self.size + 1, dtype=torch.bool)  # the last entry answers for unit -1
        gone[list(removed)] = True
        gone[-1] = False
        for member in self.members:
            yield member, ~gone[member.units]

    def per_unit(self, member: Member, values: Tensor) -> Tensor:
        """Sum ``values``, of the shape of ``member``'s tensor, over everything but the units.

        Returns:
            Tensor of shape (size,) in float64.
        """
        others = [dim for dim in range(values.dim()) if dim != member.dim]
        totals = values.detach().double().sum(others) if others else values.detach().double()
        units = member.units.to(values.device)
        result = torch.zeros(self.size + 1, dtype=torch.float64, device=values.device)
        result.index_add_(0, torch.where(units < 0, self.size, units), totals)
        return result[: self.size]


def kept_indices(keep: Tensor) -> Tensor:
    """Return the sorted indices at which ``keep`` is True."""
    return keep.nonzero().flatten()
