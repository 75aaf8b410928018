"""Linear layers seen as projections, and the members of a group on either side of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from robustdist.pruning.groups import Member, UnitAttribute

__all__ = ["Projection", "as_projection", "integers", "is_below", "join", "own_parameter", "projections_in"]


@dataclass(frozen=True)
class Projection:
    """A linear map of the last dimension.

    Attributes:
        path: Path of the layer.
        layer: ``nn.Linear``, or GPT-2's layer with the weight the other way round.
        row_dim: Dimension of the weight that is the output: 0, or 1 for GPT-2's.
    """

    path: str
    layer: nn.Module
    row_dim: int = 0

    @property
    def weight(self) -> Tensor:
        """The weight."""
        return self.layer.get_parameter("weight")

    @property
    def rows(self) -> int:
        """Output width."""
        return self.weight.shape[self.row_dim]

    @property
    def columns(self) -> int:
        """Input width."""
        return self.weight.shape[1 - self.row_dim]

    def produces(self, units: Tensor) -> list[Member]:
        """Weight and bias, whose rows make ``units``."""
        members = [Member(join(self.path, "weight"), self.row_dim, units, "producer")]
        if own_parameter(self.layer, "bias") is not None:
            members.append(Member(join(self.path, "bias"), 0, units, "producer"))
        return members

    def consumes(self, units: Tensor) -> list[Member]:
        """The weight, whose columns read ``units``."""
        return [Member(join(self.path, "weight"), 1 - self.row_dim, units, "consumer")]

    def row_counts(self, per_unit: int) -> list[UnitAttribute]:
        """Attributes with the output width; those of torch's own layers follow from the shapes."""
        return [UnitAttribute(self.path, "nf", per_unit)] if self.row_dim else []


def as_projection(path: str, layer: nn.Module) -> Projection | None:
    """Return ``layer`` as a projection; ``None`` if it is none, or if its weight is computed from others."""
    weight = own_parameter(layer, "weight")
    if weight is None or weight.dim() != 2:
        return None
    if isinstance(layer, nn.Linear):
        return Projection(path, layer)
    return Projection(path, layer, row_dim=1) if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") else None


def projections_in(root: nn.Module, path: str, without: Iterable[str] = ()) -> Iterator[Projection]:
    """Yield the projections of ``root``, which is at ``path``, in order; not those below paths in ``without``."""
    skipped = tuple(without)
    for name, layer in root.named_modules():
        full = join(path, name)
        found = None if any(is_below(full, other) for other in skipped) else as_projection(full, layer)
        if found is not None:
            yield found


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter ``name`` of ``module`` itself, if there is one."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)


def integers(module: nn.Module) -> dict[str, int]:
    """Return the plain integer attributes of ``module``."""
    return {name: value for name, value in vars(module).items() if type(value) is int}


def join(path: str, name: str) -> str:
    """Return the path of ``name`` below ``path``; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def is_below(path: str, root: str) -> bool:
    """Return whether ``path`` is ``root`` or something in it."""
    return not root or path == root or path.startswith(f"{root}.")
