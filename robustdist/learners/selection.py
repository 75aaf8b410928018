"""Which linear layers get a pair, and which parameters of the model are trained beside the pairs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from robustdist.errors import UsageError

__all__ = [
    "ALL_LINEAR",
    "ATTENTION",
    "HEAD",
    "Patterns",
    "biases",
    "head_parameters",
    "linear_parameters",
    "targets_of",
]

#: One regular expression or several, searched for in dotted names; one that matches is enough.
Patterns: TypeAlias = str | Sequence[str]

ALL_LINEAR = "all-linear"
#: Usual names of what comes after the encoder.
HEAD = r"(^|\.)(pooler|pre_classifier|classifier|score|qa_outputs|head|heads|fc)(\.|$)"
#: Usual names of attention blocks.
ATTENTION = r"attn|attention"


def targets_of(module: nn.Module, targets: Patterns, head: Patterns | None) -> dict[str, nn.Linear]:
    """Return the linear layers beside which pairs are put, by name: those that match, outside the head.

    Raises:
        UsageError: If there is none, or one of them cannot have a pair.
    """
    everything = targets == ALL_LINEAR
    linear = _linear_layers(module)
    body = {name: layer for name, layer in linear.items() if not _matches(name, head)}
    chosen = body if everything else {name: layer for name, layer in body.items() if _matches(name, targets)}
    if not chosen:
        raise UsageError(f"targets={targets!r} matches no linear layer outside the head: {_offer(body or linear)}")
    owners = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    for name, layer in chosen.items():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        reason = None
        if weight is None:
            reason = "has a weight that is computed from others"
        elif owners[id(weight)] > 1:
            reason = "shares its weight with another layer"
        elif not weight.is_floating_point():
            reason = f"has a weight of type {weight.dtype}"
        if reason is not None:
            raise UsageError(f"targets: {name} {reason}, so nothing can be merged into it: name other layers")
    if everything:
        for name, part in module.named_modules():
            if isinstance(part, nn.MultiheadAttention) and not _matches(name, head):
                raise UsageError(
                    f"targets={ALL_LINEAR!r}: {name} is an nn.MultiheadAttention, which does not call its projections "
                    "as layers: name the linear layers beside it, for example targets='linear1|linear2'"
                )
    return chosen


def linear_parameters(module: nn.Module, patterns: Patterns, head: Patterns | None, option: str) -> list[str]:
    """Return the names of weights and biases of the linear layers that match, outside the head.

    Raises:
        UsageError: If there is none.
    """
    linear = {name: layer for name, layer in _linear_layers(module).items() if not _matches(name, head)}
    chosen = [name for name in linear if _matches(name, patterns)]
    if not chosen:
        raise UsageError(f"{option}={patterns!r} matches no linear layer outside the head: {_offer(linear)}")
    return [f"{name}.{key}" for name in chosen for key, _ in linear[name].named_parameters(recurse=False)]


def head_parameters(module: nn.Module, head: Patterns | None) -> list[str]:
    """Return the names of the parameters of the head; none for ``head=None``.

    Raises:
        UsageError: If the patterns match nothing.
    """
    found = [name for name, _ in module.named_parameters() if _matches(name.rpartition(".")[0], head)]
    if head is not None and not found:
        raise UsageError(
            f"head={head!r} matches no layer: name the one that is trained in full, or write head=None; "
            f"{_offer(_linear_layers(module))}"
        )
    return found


def biases(module: nn.Module) -> list[str]:
    """Return the names of all biases, those of norms too."""
    return [name for name, _ in module.named_parameters() if name.rpartition(".")[2] == "bias"]


def check_patterns(patterns: Patterns | None, option: str) -> None:
    """Refuse what is not made of regular expressions.

    Raises:
        UsageError: Naming the option.
    """
    given = [patterns] if isinstance(patterns, str) else list(patterns or ())
    try:
        for pattern in given:
            re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UsageError(f"{option}={patterns!r} must be made of regular expressions: {error}") from error


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    inside_attention = {id(part.out_proj) for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and id(part) not in inside_attention
    }


def _matches(name: str, patterns: Patterns | None) -> bool:
    if patterns is None:
        return False
    given = [patterns] if isinstance(patterns, str) else patterns
    return any(re.search(pattern, name) for pattern in given)


def _offer(layers: dict[str, nn.Linear]) -> str:
    if not layers:
        return "there are no linear layers (those made in configure_model come too late: make them in __init__)"
    # blocks of an encoder repeat themselves: one line for all numbers
    names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in layers))
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"there are {', '.join(names[:12])}{more}"
