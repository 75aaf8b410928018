"""Finds the feed-forward part of transformer blocks by its pair of layers, and makes groups of its units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from robustdist.pruning.groups import Member, UnitAttribute, UnitGroup
from robustdist.pruning.heads import WIDTH, Attention
from robustdist.pruning.projections import Projection, integers, is_below, join, projections_in

__all__ = ["blocks_of", "ffn_groups"]


def blocks_of(module: nn.Module, attentions: Sequence[Attention]) -> dict[str, int]:
    """Return the blocks around attention: the smallest modules that hold linear layers besides it.

    Returns:
        Path -> width of its residual stream.
    """
    scopes = [attention.scope for attention in attentions]
    blocks: dict[str, int] = {}
    for attention in attentions:
        path = attention.scope
        while path:
            path = path.rpartition(".")[0]
            if next(projections_in(module.get_submodule(path), path, without=scopes), None) is not None:
                break
        blocks.setdefault(path, attention.width)
    return blocks


def ffn_groups(module: nn.Module, attentions: Sequence[Attention], notes: dict[str, str]) -> Iterator[UnitGroup]:
    r"""Yield the feed-forward parts: ``down(act(up(x)))``, or gated, ``down(act(gate(x)) * up(x))``.

    Args:
        module: Any module.
        attentions: Its attention layers; feed-forward parts are looked for in the blocks around them only.
        notes: Path -> why a part cannot be pruned, filled.
    """
    scopes = [attention.scope for attention in attentions]
    claimed: set[str] = set()
    for block, width in blocks_of(module, attentions).items():
        root = module.get_submodule(block)
        inside = [join(block, name) for name, _ in root.named_modules()]
        for path in sorted(inside, key=lambda path: -path.count(".") if path else 1):
            rest = list(projections_in(module.get_submodule(path), path, without=[*scopes, *claimed]))
            found = _pair(rest, width)
            if found is None:
                continue
            claimed.update(projection.path for projection in rest)
            reason = _between(module, path, found, scopes)
            if reason:
                notes[found[0].path] = reason
            else:
                yield _group(module, path, found)


def _pair(rest: Sequence[Projection], width: int) -> tuple[Projection, ...] | None:
    """Return one or two layers that widen and the one that narrows, if ``rest`` is exactly that."""
    if not 2 <= len(rest) <= 3:
        return None
    *up, down = sorted(rest, key=lambda projection: projection.rows == width)
    inner = down.columns
    fits = down.rows == width != inner and all((p.columns, p.rows) == (width, inner) for p in up)
    fused = len(up) == 1 and down.rows == width == up[0].columns and up[0].rows == 2 * inner
    return (*up, down) if fits or fused else None


def _between(module: nn.Module, path: str, layers: Sequence[Projection], scopes: Sequence[str]) -> str:
    """Return why the units between the layers do not stand alone, or nothing."""
    inner = layers[-1].columns
    if layers[0].rows != inner:
        return "it makes gate and values in one layer, in an order that cannot be told: split it into two"
    known = {projection.path for projection in layers}
    root = module.get_submodule(path)
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        full = join(path, name)
        outside = full.rpartition(".")[0] not in known and not any(is_below(full, scope) for scope in scopes)
        if outside and inner in tensor.shape:
            return f"{full} acts between its layers"
    return ""


def _group(module: nn.Module, path: str, layers: Sequence[Projection]) -> UnitGroup:
    *up, down = layers
    size = down.columns
    units = torch.arange(size)
    members: list[Member] = []
    attributes: list[UnitAttribute] = []
    for projection in up:
        members.extend(projection.produces(units))
        attributes.extend(projection.row_counts(1))
    members.extend(down.consumes(units))
    owners = dict.fromkeys([path, *(projection.path.rpartition(".")[0] for projection in layers)])
    for owner in owners:
        found = integers(module.get_submodule(owner)).items()
        attributes.extend(UnitAttribute(owner, name) for name, value in found if value == size and WIDTH.search(name))
    return UnitGroup(up[0].path, "ffn", size, tuple(members), tuple(attributes))
