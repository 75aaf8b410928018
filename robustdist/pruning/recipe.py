"""The recipe: what is kept of which tensor, as plain data that rebuilds a pruned model from its class."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.pruning.groups import UnitGroup, kept_indices
from robustdist.pruning.layers import attributes_of_layer
from robustdist.pruning.projections import is_below
from robustdist.pruning.surgery import UndoLog, operate

__all__ = ["Cut", "Fingerprint", "PruningRecipe", "compile_recipe", "tensor_aliases"]

_VERSION = 1


@dataclass(frozen=True)
class Fingerprint:
    """What tells the dense model of a recipe from others: names and shapes of its tensors.

    Attributes:
        model: Class name, for messages.
        num_params: Number of parameters.
        shapes: sha256 of names and shapes of parameters and buffers.
    """

    model: str
    num_params: int
    shapes: str

    @classmethod
    def of(cls, module: nn.Module) -> Fingerprint:
        """Return the fingerprint of ``module``; on the meta device too."""
        # not state_dict(): hooks of others may change what it returns
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        lines = sorted(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors)
        return cls(
            type(module).__name__,
            sum(parameter.numel() for parameter in module.parameters()),
            hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        )


@dataclass(frozen=True)
class Cut:
    """One dimension of one tensor, and which of its indices stay.

    Attributes:
        tensor: Name of a parameter or buffer.
        dim: The dimension.
        keep: One bool per index of the dense dimension.
    """

    tensor: str
    dim: int
    keep: tuple[bool, ...]

    @property
    def index(self) -> Tensor:
        """The kept indices, in order."""
        return kept_indices(torch.tensor(self.keep))


@dataclass(frozen=True)
class PruningRecipe:
    """What of a dense model is left: plain data, no code.

    A fresh module of the model's class and the recipe make the small module, without tracing and without
    torch-pruning; then a strict ``load_state_dict`` fits.

    Attributes:
        dense: Fingerprint of the model it applies to.
        cuts: What stays of which tensor; a tensor shared by several layers is named once.
        attributes: Module path -> attribute -> new value, for example ``out_channels``.
        swaps: Paths of ``nn.MultiheadAttention`` modules that get a class whose heads can go.
        dropped_layers: Paths of blocks that are passed through.
        aliases: Other names of shared tensors -> the name that ``cuts`` uses.
        provenance: How it came about: method, target, step; plain values, no part of :meth:`hash`.

    Example:
        >>> from robustdist.pruning.groups import Member
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> places = [("0.weight", 0, "producer"), ("0.bias", 0, "producer"), ("2.weight", 1, "consumer")]
        >>> group = UnitGroup("0", "channels", 3, tuple(Member(t, d, torch.arange(3), r) for t, d, r in places))
        >>> recipe = compile_recipe(net, [group], {"0": [1]})
        >>> _ = PruningRecipe.from_json(recipe.to_json()).apply(net)
        >>> net
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): ReLU()
          (2): Linear(in_features=2, out_features=1, bias=True)
        )
    """

    dense: Fingerprint
    cuts: tuple[Cut, ...] = ()
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    swaps: tuple[str, ...] = ()
    dropped_layers: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, module: nn.Module) -> UndoLog:
        """Make ``module`` small, in place; parameters stay the same objects.

        Dtype, device, ``requires_grad``, memory format and gradients are kept; the meta device works.

        Returns:
            An :class:`~robustdist.pruning.surgery.UndoLog`; its ``undo()`` puts everything back.

        Raises:
            UsageError: If ``module`` is not the dense model of this recipe; it is left untouched.
        """
        self.check_fits(module)
        return operate(
            module,
            swaps=self.swaps,
            dropped_layers=self.dropped_layers,
            cuts=((cut.tensor, cut.dim, cut.index) for cut in self.cuts),
            attributes=self.attributes,
        )

    def check_fits(self, module: nn.Module) -> None:
        """Refuse a module that is not the dense model.

        Raises:
            UsageError: Naming both models, and a tensor that differs.
        """
        found = Fingerprint.of(module)
        if found.shapes == self.dense.shapes:
            return
        raise UsageError(
            f"the pruning recipe was made for {self.dense.model} with {self.dense.num_params:,} parameters, this is "
            f"{found.model} with {found.num_params:,}{self._difference(module)}: build the module with the "
            "hyper-parameters of the pruned run, before any pruning"
        )

    def _difference(self, module: nn.Module) -> str:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for cut in self.cuts:
            if cut.tensor not in tensors:
                return f" (it has no {cut.tensor})"
            shape = tensors[cut.tensor].shape
            if cut.dim >= len(shape) or shape[cut.dim] != len(cut.keep):
                return f" ({cut.tensor} has shape {tuple(shape)}, dimension {cut.dim} should be {len(cut.keep)})"
        return ""

    def slice_like(self, name: str, tensor: Tensor) -> Tensor | None:
        """Cut ``tensor``, something of the shape of the dense tensor ``name``: a moment, an average, a residual.

        Returns:
            The kept part as a new tensor; ``tensor`` itself where nothing of ``name`` goes or it is a scalar such as a
            step count; ``None`` if it has another shape, so that it cannot follow and has to start anew, or if nothing
            is left of it because its layer is dropped.
        """
        if self.drops(name):
            return None
        own = self.aliases.get(name, name)
        cuts = [cut for cut in self.cuts if cut.tensor == own]
        if not cuts or tensor.dim() == 0:
            return tensor
        if any(cut.dim >= tensor.dim() or tensor.shape[cut.dim] != len(cut.keep) for cut in cuts):
            return None
        for cut in cuts:
            tensor = tensor.index_select(cut.dim, cut.index.to(tensor.device))
        return tensor

    def drops(self, path: str) -> bool:
        """Return whether the tensor or module at ``path`` is in a dropped layer, or is one."""
        return any(is_below(path, layer) for layer in self.dropped_layers)

    def compose(self, later: PruningRecipe) -> PruningRecipe:
        """Return the recipe that does this one and then ``later``, which was made for the result of this one."""
        keeps = {(cut.tensor, cut.dim): cut.keep for cut in self.cuts}
        for cut in later.cuts:
            before = keeps.get((cut.tensor, cut.dim))
            rest = iter(cut.keep)
            keeps[cut.tensor, cut.dim] = (
                cut.keep if before is None else tuple(stayed and next(rest) for stayed in before)
            )
        attributes = {path: dict(values) for path, values in self.attributes.items()}
        for path, values in later.attributes.items():
            attributes.setdefault(path, {}).update(values)
        both = replace(
            self,
            cuts=tuple(Cut(tensor, dim, keep) for (tensor, dim), keep in keeps.items()),
            attributes=attributes,
            swaps=tuple(dict.fromkeys([*self.swaps, *later.swaps])),
            dropped_layers=tuple(dict.fromkeys([*self.dropped_layers, *later.dropped_layers])),
            aliases={**self.aliases, **later.aliases},
            provenance={**self.provenance, **later.provenance},
        )
        return both._without_dropped()

    def _without_dropped(self) -> PruningRecipe:
        """Leave out what would be done to tensors and modules of dropped layers."""
        return replace(
            self,
            cuts=tuple(cut for cut in self.cuts if not self.drops(cut.tensor)),
            attributes={path: values for path, values in self.attributes.items() if not self.drops(path)},
            swaps=tuple(path for path in self.swaps if not self.drops(path)),
        )

    def after(self, earlier: PruningRecipe, module: nn.Module) -> PruningRecipe:
        """Return what is left to do on ``module``, where ``earlier``, the first part of this recipe, is done already.

        The other way round of :meth:`compose`.
        """
        before = {(cut.tensor, cut.dim): cut.keep for cut in earlier.cuts}
        cuts = []
        for cut in self.cuts:
            stayed = before.get((cut.tensor, cut.dim), (True,) * len(cut.keep))
            keep = tuple(stays for stays, there in zip(cut.keep, stayed, strict=True) if there)
            if not all(keep):
                cuts.append(replace(cut, keep=keep))
        return replace(
            self,
            dense=Fingerprint.of(module),
            cuts=tuple(cuts),
            swaps=tuple(path for path in self.swaps if path not in earlier.swaps),
            dropped_layers=tuple(path for path in self.dropped_layers if path not in earlier.dropped_layers),
        )

    def hash(self) -> str:
        """Return the sha256 of what the recipe does, the same on every rank and machine."""
        content = self.to_dict()
        content.pop("provenance")
        content["cuts"] = sorted(content["cuts"])
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers, as they go into a checkpoint."""
        masks = sorted({_packed(cut.keep) for cut in self.cuts})
        return {
            "version": _VERSION,
            "dense": {"model": self.dense.model, "num_params": self.dense.num_params, "shapes": self.dense.shapes},
            # most masks serve several tensors: each is written once
            "masks": [list(mask) for mask in masks],
            "cuts": [[cut.tensor, cut.dim, masks.index(_packed(cut.keep))] for cut in self.cuts],
            "attributes": {path: dict(values) for path, values in self.attributes.items()},
            "swaps": list(self.swaps),
            "dropped_layers": list(self.dropped_layers),
            "aliases": dict(self.aliases),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PruningRecipe:
        """Read what :meth:`to_dict` wrote.

        Raises:
            UsageError: If it is no recipe, or of a later version.
        """
        version = content.get("version")
        if version != _VERSION:
            raise UsageError(
                f"this is no pruning recipe of version {_VERSION} (version {version!r}): update robustdist, or name "
                "a checkpoint that StructuredPruning wrote"
            )
        try:
            masks = [_unpacked(size, text) for size, text in content["masks"]]
            return cls(
                dense=Fingerprint(**content["dense"]),
                cuts=tuple(Cut(tensor, dim, masks[mask]) for tensor, dim, mask in content["cuts"]),
                attributes={path: _tuples(values) for path, values in content["attributes"].items()},
                swaps=tuple(content["swaps"]),
                dropped_layers=tuple(content["dropped_layers"]),
                aliases=dict(content["aliases"]),
                provenance=dict(content["provenance"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UsageError(f"the pruning recipe is damaged ({error!r}): take it from the checkpoint again") from error

    def to_json(self, indent: int | None = None) -> str:
        """Return the recipe as JSON."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PruningRecipe:
        """Read what :meth:`to_json` wrote.

        Raises:
            UsageError: If it is no recipe.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"the pruning recipe is no JSON ({error}): write it with to_json()") from error
        if not isinstance(content, dict):
            raise UsageError("the pruning recipe is no JSON object: write it with to_json()")
        return cls.from_dict(content)


def tensor_aliases(module: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that ``module`` holds under several, with the first name of each."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(parameter), name)
        if own != name:
            aliases[name] = own
    return aliases


def compile_recipe(
    module: nn.Module,
    groups: Iterable[UnitGroup],
    removed: Mapping[str, Sequence[int]],
    *,
    dropped_layers: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
) -> PruningRecipe:
    """Turn removed units into a recipe.

    Args:
        module: The dense module that ``groups`` were found in.
        groups: Groups; those without removed units do nothing.
        removed: Group name -> units that go; those of kind "layers" are dropped layers.
        dropped_layers: Paths of further blocks to pass through.
        provenance: Plain values to keep with it.

    Raises:
        UsageError: If a group would lose all its units, or a unit that is locked.
    """
    aliases = tensor_aliases(module)
    keeps: dict[tuple[str, int], Tensor] = {}
    attributes: dict[str, dict[str, Any]] = {}
    swaps: list[str] = []
    dropped = dict.fromkeys(dropped_layers)
    for group in groups:
        gone = sorted(set(removed.get(group.name, ())))
        if not gone:
            continue
        _check_units(group, gone)
        dropped.update(dict.fromkeys(group.layers[unit] for unit in gone if group.layers))
        for member, keep in group.kept(gone):
            place = aliases.get(member.tensor, member.tensor), member.dim
            keeps[place] = keeps[place] & keep if place in keeps else keep
        for attribute in group.attributes:
            left = attribute.per_unit * (group.size - len(gone))
            attributes.setdefault(attribute.module, {})[attribute.name] = left
        swaps.extend(group.swaps)
    cuts = tuple(
        Cut(tensor, dim, tuple(keep.tolist())) for (tensor, dim), keep in sorted(keeps.items(), key=lambda e: e[0])
    )
    for path, values in _layer_attributes(module, cuts, aliases).items():
        attributes.setdefault(path, {}).update(values)
    recipe = PruningRecipe(
        dense=Fingerprint.of(module),
        cuts=cuts,
        attributes=attributes,
        swaps=tuple(dict.fromkeys(swaps)),
        dropped_layers=tuple(dropped),
        aliases=aliases,
        provenance=dict(provenance or {}),
    )
    return recipe._without_dropped()


def _check_units(group: UnitGroup, gone: Sequence[int]) -> None:
    if len(gone) >= group.size:
        remedy = "drop_layers for the whole block, or min_heads" if group.kind == "heads" else "a smaller amount"
        raise UsageError(f"group {group.name}: all {group.size} {group.kind} selected; use {remedy}")
    fixed = sorted(group.locked & set(gone))
    if fixed:
        raise UsageError(f"group {group.name}: units {fixed[:5]} cannot go; put the group into ignore")


def _layer_attributes(
    module: nn.Module, cuts: Sequence[Cut], aliases: Mapping[str, str]
) -> dict[str, dict[str, int | tuple[int, ...]]]:
    """Attributes of torch's own layers after the cuts; layers that share a tensor all get theirs."""
    sizes: dict[str, dict[int, int]] = {}
    for cut in cuts:
        sizes.setdefault(cut.tensor, {})[cut.dim] = sum(cut.keep)
    result = {}
    for path, layer in module.named_modules():
        shapes, changed = {}, False
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            full = f"{path}.{name}" if path else name
            left = sizes.get(aliases.get(full, full), {})
            shapes[name] = tuple(left.get(dim, size) for dim, size in enumerate(tensor.shape))
            changed = changed or bool(left)
        if changed:
            result[path] = attributes_of_layer(layer, shapes)
    return result


def _packed(keep: Sequence[bool]) -> tuple[int, str]:
    value = int("".join("1" if stays else "0" for stays in keep), 2)
    return len(keep), base64.b64encode(value.to_bytes((len(keep) + 7) // 8, "big")).decode()


def _unpacked(size: int, text: str) -> tuple[bool, ...]:
    value = int.from_bytes(base64.b64decode(text, validate=True), "big")
    if value >> size:
        raise ValueError(f"mask of {size} bits holds more")
    return tuple(bit == "1" for bit in format(value, f"0{size}b"))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples: ``normalized_shape`` is one."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
