"""Groups of transformers, found by their structure: no tracing, no example, no library of models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from robustdist.errors import UsageError
from robustdist.pruning.attention import PassThrough
from robustdist.pruning.ffn import blocks_of, ffn_groups
from robustdist.pruning.groups import Kind, UnitGroup
from robustdist.pruning.heads import find_attentions
from robustdist.pruning.hidden import hidden_group
from robustdist.pruning.projections import is_below

__all__ = ["droppable_layers", "transformer_groups"]


def transformer_groups(
    module: nn.Module, *, kinds: Collection[Kind] = ("heads", "ffn"), refused: dict[str, str] | None = None
) -> list[UnitGroup]:
    """Find what can be removed from the transformers in ``module``.

    Attention is found by layers named for queries, keys and values, or one for all three, its heads by integer
    attributes (``num_heads``, ``head_dim``) that agree with the shapes; ``nn.MultiheadAttention`` by its class.
    Feed-forward parts are pairs of layers, or three if gated, that widen and narrow the stream beside attention. With
    grouped keys and values a unit is one of those with its queries.

    Args:
        module: Any module; one without transformers has no groups.
        kinds: What to look for: ``heads``, ``ffn``, ``hidden``.
        refused: Path -> reason, filled with what looks like it and cannot be pruned.

    Raises:
        UsageError: For what would be refused, if ``refused`` is not given.

    Example:
        >>> [group.name for group in transformer_groups(nn.TransformerEncoderLayer(8, 2, 16))]
        ['self_attn', 'linear1']
    """
    notes: dict[str, str] = {}
    attentions = list(find_attentions(module, notes))
    unclear = [path for path in notes if path not in {attention.path for attention in attentions}]
    groups = [attention.heads for attention in attentions if attention.heads is not None] if "heads" in kinds else []
    if "heads" not in kinds:
        notes = {}
    if "ffn" in kinds:
        groups += ffn_groups(module, attentions, notes)
    groups = _shared(module, groups, notes)
    if "hidden" in kinds and attentions:
        try:
            if unclear:
                raise UsageError(f"{unclear[0]} is not understood")
            groups.append(hidden_group(module, attentions))
        except UsageError as error:
            notes["hidden"] = str(error)
    if refused is not None:
        refused.update(notes)
    elif notes:
        path, reason = next(iter(notes.items()))
        raise UsageError(f"{path or 'the model'} cannot be pruned: {reason}; pass refused={{}} to go on without it")
    return groups


def droppable_layers(module: nn.Module, refused: dict[str, str] | None = None) -> list[str]:
    """Return the paths of blocks that :class:`~robustdist.pruning.attention.PassThrough` can take the place of.

    A block is an entry, with attention and a feed-forward part, of a list or sequence of at least two of its class.
    Left out are blocks that share parameters with others, blocks that by their signature return more than the stream,
    and first blocks that the model needs: ``nn.TransformerEncoder`` asks its first for the layout of the batch, and a
    cache of keys counts the tokens seen at the first layer of a decoder. Blocks that were dropped before do not count.

    Args:
        module: Any module.
        refused: Path of such a block -> why it cannot go, filled.
    """
    attentions = list(find_attentions(module, {}))
    found: dict[str, None] = {}
    notes: dict[str, str] = {} if refused is None else refused
    for path in blocks_of(module, attentions):
        while path:
            parent_path, _, name = path.rpartition(".")
            parent = module.get_submodule(parent_path)
            if isinstance(parent, (nn.ModuleList, nn.Sequential)):
                siblings = [child for child in parent.children() if not isinstance(child, PassThrough)]
                if len(siblings) > 1 and len({type(sibling) for sibling in siblings}) == 1:
                    first = name == next(parent.named_children())[0]
                    reason = _why_not_dropped(module, parent_path, path, first=first)
                    if reason:
                        notes[path] = reason
                    else:
                        found[path] = None
                break
            path = parent_path
    return list(found)


def _why_not_dropped(module: nn.Module, parent: str, path: str, *, first: bool) -> str:
    block = module.get_submodule(path)
    if "uple" in str(getattr(type(block).forward, "__annotations__", {}).get("return", "")):
        return "it returns more than the stream"
    own = {id(parameter) for parameter in block.parameters()}
    names = [name for name, parameter in module.named_parameters(remove_duplicate=False) if id(parameter) in own]
    if not all(is_below(name, path) for name in names):
        return "it shares parameters with others"
    if not first:
        return ""
    stack = module.get_submodule(parent.rpartition(".")[0])
    cached = any(hasattr(part, "layer_idx") and getattr(part, "is_causal", False) for part in block.modules())
    if cached:
        return "its cache of keys counts the tokens"
    return "the model asks it for a layout" if isinstance(stack, (nn.TransformerEncoder, nn.TransformerDecoder)) else ""


def _shared(module: nn.Module, groups: Sequence[UnitGroup], notes: dict[str, str]) -> list[UnitGroup]:
    """Join groups whose layers share a tensor, and leave out those that share one with something else."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    aliases = {name: others for others in names.values() for name in others}
    joined: list[UnitGroup] = []
    for group in groups:
        tensors = {other for member in group.members for other in aliases.get(member.tensor, [])}
        twin = next((other for other in joined if any(member.tensor in tensors for member in other.members)), None)
        if twin is None:
            joined.append(group)
        elif twin.size == group.size and twin.kind == group.kind:
            joined[joined.index(twin)] = replace(
                twin, members=twin.members + group.members, attributes=twin.attributes + group.attributes
            )
        else:
            joined.remove(twin)
            notes[group.name] = notes[twin.name] = f"{group.name} and {twin.name} share a tensor and differ in size"
    for group in list(joined):
        own = {member.tensor for member in group.members}
        strange = [name for member in group.members for name in aliases.get(member.tensor, []) if name not in own]
        outside = [name for name in strange if _owner(module, name) not in {_owner(module, n) for n in own}]
        if outside:
            joined.remove(group)
            notes[group.name] = f"it shares a tensor with {outside[0]}"
    return joined


def _owner(module: nn.Module, name: str) -> int:
    """Return the identity of the module that owns the tensor ``name``; a reused module is one."""
    return id(module.get_submodule(name.rpartition(".")[0]))
