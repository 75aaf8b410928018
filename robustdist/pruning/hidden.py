"""The width of the residual stream as one group, and norms over what is left of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from robustdist.errors import UsageError
from robustdist.pruning.groups import Member, Role, UnitAttribute, UnitGroup
from robustdist.pruning.heads import WIDTH, Attention, nested_off
from robustdist.pruning.layers import DIRECT
from robustdist.pruning.projections import as_projection, integers, join
from robustdist.pruning.recipe import PruningRecipe

__all__ = ["hidden_group", "norms_over_survivors"]


def hidden_group(module: nn.Module, attentions: Sequence[Attention]) -> UnitGroup:
    """Make one group of all dimensions of the residual stream.

    Everything as wide as the stream and no part of heads or feed-forward units belongs to it, past the blocks too: a
    pooler's output loses the same dimensions as its input, and a tied output layer those of the embedding.

    Raises:
        UsageError: If a tensor is as wide as the stream and what it does is not known, or there are several widths.
    """
    odd = [attention.path for attention in attentions if attention.output is None and attention.heads is None]
    if odd:
        raise UsageError(f"{odd[0]} is not understood")
    widths = sorted({attention.width for attention in attentions})
    if len(widths) != 1:
        raise UsageError(f"there are streams of widths {widths}")
    width, units = widths[0], torch.arange(widths[0])
    inner = {projection.path for attention in attentions for projection in attention.inputs}
    outer = {attention.output.path for attention in attentions if attention.output is not None}
    outer |= {join(attention.path, "out_proj") for attention in attentions if attention.output is None}
    members: list[Member] = []
    attributes: list[UnitAttribute] = []
    seen: set[tuple[int, int]] = set()
    for path, part in module.named_modules():
        for name, dim, role in _places(path, part, width, path in inner, path in outer):
            place = id(getattr(part, name)), dim
            if place not in seen:  # a tied tensor is one place
                seen.add(place)
                members.append(Member(join(path, name), dim, units, role))
        attributes.extend(_attributes(path, part, width, path in inner, attentions))
    swaps = [path for path, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
    attributes.extend({(a.module, a.name): a for path in swaps for a in nested_off(module, path)}.values())
    return UnitGroup("hidden", "hidden", width, tuple(members), tuple(attributes), swaps=tuple(swaps))


def _places(path: str, part: nn.Module, width: int, inner: bool, outer: bool) -> Iterator[tuple[str, int, Role]]:
    """Yield tensor, dimension and role of what one module, without its children, has of the stream."""
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    wide = {name: tensor for name, tensor in own if tensor.is_floating_point() and width in tensor.shape}
    projection = as_projection(path, part)
    if projection is not None:
        if projection.columns == width and not outer:
            yield "weight", 1 - projection.row_dim, "consumer"
        if projection.rows == width and not inner:
            yield "weight", projection.row_dim, "producer"
            if "bias" in wide:
                yield "bias", 0, "producer"
    elif isinstance(part, nn.MultiheadAttention):
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if name in wide and wide[name].shape[1] == width:
                yield name, 1, "consumer"
    elif isinstance(part, nn.Embedding):
        if part.embedding_dim == width:
            yield "weight", 1, "producer"
    elif isinstance(part, DIRECT) and part.in_channels != width:
        if part.out_channels == width:
            yield from ((name, 0, "producer") for name in wide)
    elif _is_norm(part):
        if not own and getattr(part, "normalized_shape", None) == (width,):
            raise _unknown(path, part, "it has no weight, so its width cannot follow")
        yield from ((name, 0, "norm") for name in wide)
    else:
        for name, tensor in wide.items():
            dims = [dim for dim, size in enumerate(tensor.shape) if size == width]
            if dims != [tensor.dim() - 1] or type(part).__module__.startswith("torch.nn."):
                raise _unknown(
                    join(path, name), part, f"what dimensions {dims} of {tuple(tensor.shape)} are is not known"
                )
            yield name, dims[0], "norm" if tensor.dim() == 1 else "producer"


def _unknown(path: str, part: nn.Module, reason: str) -> UsageError:
    return UsageError(f"{path} of {type(part).__name__}: {reason}")


def _attributes(
    path: str, part: nn.Module, width: int, inner: bool, attentions: Sequence[Attention]
) -> Iterator[UnitAttribute]:
    names: Iterable[str] = ()
    if isinstance(part, nn.MultiheadAttention):
        names = [name for name in ("embed_dim", "kdim", "vdim") if getattr(part, name) == width]
    elif (projection := as_projection(path, part)) is not None:
        yield from projection.row_counts(1) if projection.rows == width and not inner else ()
    elif not type(part).__module__.startswith("torch.nn.") and not any(path == a.path for a in attentions):
        names = [name for name, value in integers(part).items() if value == width and WIDTH.search(name)]
    for name in names:
        yield UnitAttribute(path, name)


def _is_norm(part: nn.Module) -> bool:
    return isinstance(part, (nn.LayerNorm, nn.RMSNorm)) or "RMSNorm" in type(part).__name__


class _OverSurvivors:
    r"""Hooks that let a norm see the surviving dimensions only, whatever its class does with ``eps`` and dtypes.

    With n of N dimensions left, scaling the survivors' distance from their mean m by s = sqrt(N / n) and putting m in
    the place of the others gives the norm over N the mean and the variance of the survivors; what it puts out is s
    times too large and divided by s. Without centring m = 0.
    """

    def __init__(self, keep: Tensor, centred: bool, dim: int) -> None:
        self.keep, self.centred, self.dim = keep, centred, dim
        self.scale = math.sqrt(keep.numel() / int(keep.sum()))

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Spread the survivors."""
        x, *rest = args
        keep = _along(self.keep.to(x.device), x, self.dim)
        wide = torch.where(keep, x if x.dtype == torch.float64 else x.float(), 0)
        mean = wide.sum(self.dim, keepdim=True) / keep.sum() if self.centred else torch.zeros_like(wide)
        return (torch.where(keep, mean + (wide - mean) * self.scale, mean).to(x.dtype), *rest)

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Take the spread back."""
        bias: Tensor | None = getattr(module, "bias", None)
        if bias is None:
            return out / self.scale
        shift = _along(bias, out, self.dim)
        return shift + (out - shift) / self.scale


def _along(values: Tensor, x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    return values.view(shape)


def norms_over_survivors(module: nn.Module, recipe: PruningRecipe) -> list[RemovableHandle]:
    """Let norms over units that are masked, and not yet cut, take their statistics over the others.

    Zeros in the place of removed dimensions change mean and variance of a LayerNorm or RMSNorm, so that the masked
    model would compute something else than the one without them.

    Args:
        module: The dense module, its removed units at zero.
        recipe: What is to be removed; if no norm runs over it, nothing is done.

    Returns:
        Handles; ``remove()`` on each ends it.
    """
    handles: list[RemovableHandle] = []
    for cut in recipe.cuts:
        path, _, name = cut.tensor.rpartition(".")
        owner = module.get_submodule(path)
        if name == "weight" and _is_norm(owner):
            # torchvision's LayerNorm over the channels of images has them in dimension 1
            dim = 1 if type(owner).__name__ == "LayerNorm2d" else -1
            hooks = _OverSurvivors(torch.tensor(cut.keep), isinstance(owner, nn.LayerNorm), dim)
            handles += [owner.register_forward_pre_hook(hooks.before), owner.register_forward_hook(hooks.after)]
    return handles
