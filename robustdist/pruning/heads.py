"""Finds attention by its projections, and makes groups of its heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robustdist.pruning.attention import SlimMultiheadAttention
from robustdist.pruning.groups import Member, UnitAttribute, UnitGroup
from robustdist.pruning.projections import (
    Projection,
    as_projection,
    integers,
    is_below,
    join,
    own_parameter,
    projections_in,
)

__all__ = ["WIDTH", "Attention", "find_attentions", "nested_off"]

#: Words that say nothing about what a projection makes.
_FILLERS = {"proj", "projection", "lin", "linear", "layer", "w", "to", "fc", "c", "dense", "net", "weight"}
_ROLES = {
    **dict.fromkeys(("q", "query", "queries", "wq"), "q"),
    **dict.fromkeys(("k", "key", "keys", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "wv"), "v"),
    **dict.fromkeys(("qkv", "wqkv", "attn", "in"), "qkv"),
    **dict.fromkeys(("kv", "wkv"), "kv"),
}
_HEADS = {"num_heads", "num_attention_heads", "n_heads", "n_head", "n_local_heads", "num_head", "nheads", "nhead"}
_HEADS |= {"heads", "h", "nh"}
_KV_HEADS = {"n_local_kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"}
_HEAD_DIM = {"head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "dim_per_head", "hd", "d_k", "dk"}
_HEAD_DIM |= {"key_value_proj_dim", "d_kv"}
_QUERIES_PER_KV = {"num_key_value_groups", "n_rep", "num_queries_per_kv"}


#: Names of widths, as opposed to lengths of sequences.
WIDTH = re.compile(
    r"emb|dim|hidden|inner|width|model|channels|features|mlp|ff|intermediate|all_head|split_size|^[cde]$"
)


@dataclass(frozen=True)
class Attention:
    """An attention layer whose structure is understood.

    Attributes:
        path: Path of the module that holds its projections to queries, keys and values.
        scope: Path of the module that holds those and the output projection.
        inputs: Projections out of the residual stream or, of cross-attention, of the other sequence.
        output: Projection back into the residual stream; ``None`` for ``nn.MultiheadAttention``, which is one module.
        width: Width of the residual stream.
        heads: Its heads as units; ``None`` if they cannot go.
    """

    path: str
    scope: str
    inputs: tuple[Projection, ...]
    output: Projection | None
    width: int
    heads: UnitGroup | None


def find_attentions(module: nn.Module, notes: dict[str, str]) -> Iterator[Attention]:
    """Yield every attention layer of ``module``, a module that is used several times once.

    Args:
        module: Any module.
        notes: Path -> why the heads of an attention cannot go, filled.
    """
    for path, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            heads = None
            if type(part) in (nn.MultiheadAttention, SlimMultiheadAttention):
                heads = _torch_heads(module, path, part)
            else:
                notes[path] = f"{type(part).__name__} may not compute what nn.MultiheadAttention does"
            yield Attention(path, path, (), None, part.embed_dim, heads)
        else:
            found = _by_projections(module, path, part, notes)
            if found is not None:
                yield found


def _torch_heads(module: nn.Module, path: str, part: nn.MultiheadAttention) -> UnitGroup:
    units = _blocks(part.num_heads, part.head_dim)
    members: list[Member] = []
    if own_parameter(part, "in_proj_weight") is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        members.extend(Member(join(path, name), 0, units, "producer") for name in names)
    else:
        members.append(Member(join(path, "in_proj_weight"), 0, units.repeat(3), "producer"))
    if part.in_proj_bias is not None:
        members.append(Member(join(path, "in_proj_bias"), 0, units.repeat(3), "producer"))
    if part.bias_k is not None:
        members.extend(Member(join(path, name), 2, units, "producer") for name in ("bias_k", "bias_v"))
    members.append(Member(join(path, "out_proj.weight"), 1, units, "consumer"))
    attributes = [UnitAttribute(path, "num_heads"), *nested_off(module, path)]
    return UnitGroup(path or "heads", "heads", part.num_heads, tuple(members), tuple(attributes), swaps=(path,))


def nested_off(module: nn.Module, path: str) -> list[UnitAttribute]:
    """Switch nested tensors off in the encoder around an ``nn.MultiheadAttention``: only its fused path takes them."""
    return [
        UnitAttribute(parent, "use_nested_tensor", 0)
        for parent, part in module.named_modules()
        if isinstance(part, nn.TransformerEncoder) and is_below(path, parent)
    ]


def _by_projections(module: nn.Module, path: str, part: nn.Module, notes: dict[str, str]) -> Attention | None:
    named = {role: name for name, _ in part.named_children() if (role := _role(name)) is not None}
    wanted = next((roles for roles in (("q", "k", "v"), ("q", "kv"), ("qkv",)) if set(roles) <= set(named)), None)
    if wanted is None:
        return None
    paths = {role: join(path, named[role]) for role in wanted}
    seen = {role: as_projection(paths[role], part.get_submodule(named[role])) for role in wanted}
    found = {role: projection for role, projection in seen.items() if projection is not None}
    if len(found) < len(wanted):
        odd = next(role for role in wanted if role not in found)
        layer = module.get_submodule(paths[odd])
        if found or (len(wanted) == 3 and any(isinstance(inner, nn.Linear) for inner in layer.modules())):
            reason = (
                f"{named[odd]} is {type(layer).__name__}, no plain nn.Linear (merge adapters, drop parametrizations)"
            )
            notes[path] = reason
        return None  # else convolutions or containers: not what transformers are made of
    split = _Split(part, found)
    if wanted == ("qkv",) and not split.told and _telling(named["qkv"]) != ["qkv"]:
        return None  # in_proj and the like are not attention's alone
    output, scope = _output(module, path, part, set(paths.values()))
    if output is None:
        notes[path] = "no layer could be told to be its output projection"
        return None
    reason = split.mismatch(output) or _per_head(module, scope, {p.path for p in (*found.values(), output)}, split)
    if reason:
        notes[path] = reason
    heads = None if reason else split.group(path, output)
    return Attention(path, scope, tuple(found.values()), output, found[wanted[0]].columns, heads)


def _telling(name: str) -> list[str]:
    return [word for word in re.split(r"[_.]+", name.lower()) if word and word not in _FILLERS]


def _role(name: str) -> str | None:
    telling = _telling(name)
    if telling == ["query", "key", "value"]:
        return "qkv"
    return _ROLES.get(telling[0]) if len(telling) == 1 else None


def _output(module: nn.Module, path: str, part: nn.Module, inputs: set[str]) -> tuple[Projection | None, str]:
    """Find the output projection beside the others, or as the only one next door (BERT's ``self`` and ``output``)."""
    rest = list(projections_in(part, path, without=inputs))
    if len(rest) > 1:
        rest = [projection for projection in rest if _is_output_name(projection.path[len(path) :])]
    if len(rest) == 1:
        return rest[0], path
    parent = path.rpartition(".")[0]
    if rest or not path:
        return None, path
    next_door = list(projections_in(module.get_submodule(parent), parent, without=[path]))
    return (next_door[0], parent) if len(next_door) == 1 else (None, path)


def _is_output_name(path: str) -> bool:
    return all(word.isdigit() or word in ("o", "out", "output", "wo") for word in _telling(path))


class _Split:
    """How the rows of an attention's projections are divided among heads."""

    def __init__(self, part: nn.Module, inputs: dict[str, Projection]) -> None:
        self.part, self.inputs = part, inputs
        first = next(iter(inputs.values()))
        self.inner = first.rows // 3 if "qkv" in inputs else first.rows
        self.keys = inputs["kv"].rows // 2 if "kv" in inputs else inputs["k"].rows if "k" in inputs else self.inner
        self.values = inputs["v"].rows if "v" in inputs else self.keys
        own = integers(part)
        dims = {value for name, value in own.items() if name in _HEAD_DIM}
        counts = {value for name, value in own.items() if name in _HEADS}
        if not dims and not counts:
            config = getattr(part, "config", None)
            counts = {value for name in _HEADS if type(value := getattr(config, name, None)) is int}
        self.told = len(dims) == 1 or (not dims and len(counts) == 1)
        self.heads = self.head_dim = self.kv_heads = self.value_dim = 1
        if self.told:
            self.head_dim = max(1, dims.pop() if dims else self.inner // max(counts))
            self.heads = max(1, self.inner // self.head_dim)
            self.kv_heads = max(1, self.keys // self.head_dim)
            self.value_dim = self.values // self.kv_heads
            # one integer named h may as well be a width
            self.told = counts <= {self.heads} and (self.head_dim > 1 or not counts)

    def mismatch(self, output: Projection) -> str:
        """Return why the layers are not heads side by side, or nothing."""
        if not self.told:
            return "its number of heads cannot be told (integer attributes num_heads and head_dim that agree tell it)"
        first = next(iter(self.inputs.values()))
        if _telling(first.path.rpartition(".")[2]) == ["query", "key", "value"]:
            return "whether its rows go by head or by query, key, value cannot be told: split it into three layers"
        if (
            self.heads * self.head_dim != self.inner
            or ("qkv" in self.inputs and first.rows != 3 * self.inner)
            or self.kv_heads * self.head_dim != self.keys
            or self.kv_heads * self.value_dim != self.values
            or self.heads % self.kv_heads
            or output.columns != self.heads * self.value_dim
        ):
            return (
                f"{self.inner} query, {self.keys} key and {self.values} value rows and {output.columns} columns of "
                f"{output.path} are not heads of {self.head_dim}"
            )
        return ""

    def group(self, path: str, output: Projection) -> UnitGroup:
        """Return the heads as units; with grouped keys and values, one of those with its queries."""
        shared = self.kv_heads == 1 < self.heads  # one key for all queries stays, and queries go alone
        size = self.heads if shared else self.kv_heads
        members: list[Member] = []
        attributes: list[UnitAttribute] = []
        for role, projection in self.inputs.items():
            if role == "q" or not shared:
                repeats = {"qkv": 3, "kv": 2}.get(role, 1)
                units = _blocks(size, projection.rows // repeats // size).repeat(repeats)
                members.extend(projection.produces(units))
                attributes.extend(projection.row_counts(len(units) // size))
        members.extend(output.consumes(_blocks(size, output.columns // size)))
        attributes.extend(self._attributes(path, size, shared))
        return UnitGroup(path or "heads", "heads", size, tuple(members), tuple(attributes))

    def _attributes(self, path: str, size: int, shared: bool) -> Iterator[UnitAttribute]:
        for name, value in integers(self.part).items():
            if name in _HEADS:
                yield UnitAttribute(path, name, self.heads // size)
            elif (name in _QUERIES_PER_KV and shared) or (name in _KV_HEADS and not shared):
                yield UnitAttribute(path, name)
            elif value == self.inner and name not in _HEAD_DIM and WIDTH.search(name):
                # where the residual stream is as wide too: in an attention it is what heads are reshaped to
                yield UnitAttribute(path, name, self.inner // size)


def _per_head(module: nn.Module, scope: str, known: set[str], split: _Split) -> str:
    """Return what, past the projections, has something for each head: a table of biases, a scale, a norm."""
    part = module.get_submodule(scope)
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        full = join(scope, name)
        owner = full.rpartition(".")[0]
        square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]  # a causal mask
        sizes = {split.heads, split.kv_heads} - {1, split.head_dim}
        if tensor.dim() == 1 and _role(owner.rpartition(".")[2].replace("norm", "w")) is not None:
            sizes |= {split.inner, split.keys} - {split.head_dim}
        if owner not in known and not square and sizes & set(tensor.shape):
            return f"{full} seems to have something for each head"
    return ""


def _blocks(count: int, length: int) -> Tensor:
    return torch.arange(count).repeat_interleave(length)
