"""Hashes that tell whether two evaluations judge the same weights, with the same attacks, on the same images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack

__all__ = ["attacks_hash", "code_text", "image_digests", "model_hash"]


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def model_hash(module: nn.Module) -> str:
    """Return a hash of class, parameters and buffers of ``module``: names, shapes, number formats and values.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> before = model_hash(net)
        >>> _ = nn.init.zeros_(net.weight)
        >>> len(before), before == model_hash(net)
        (32, False)
    """
    digest = hashlib.blake2b(type(module).__qualname__.encode(), digest_size=16)
    # also buffers that a checkpoint leaves out, such as means and standard deviations
    held = {**module.state_dict(), **dict(module.named_buffers())}
    for name, value in sorted(held.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(_bytes_of(value))
        else:  # what a module returns from get_extra_state
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()


def code_text(function: Any) -> str:
    """Return what tells one function from another of the same name: its name, and its code where it has some."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} {_described(code)}"


def _described(code: CodeType) -> str:
    # a function within a function is a constant whose text holds its address
    constants = [_described(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names}"


def attacks_hash(attacks: Mapping[str, Attack]) -> str:
    """Return a hash of the names, classes and settings of attacks, in order; seeds are among the settings."""
    described = [
        [
            name,
            type(attack).__module__,
            type(attack).__qualname__,
            attack.settings(),
            code_text(attack.attack_loss) if callable(attack.attack_loss) else "",
        ]
        for name, attack in attacks.items()
    ]
    return hashlib.blake2b(json.dumps(described, default=repr).encode(), digest_size=16).hexdigest()


def image_digests(x: Tensor, y: Any) -> Tensor:
    """Return one number per row of a batch, of its pixels and its label: shape (batch,), int64, never 0."""
    labels = y.tolist() if isinstance(y, Tensor) else list(y)
    digests = []
    for row, label in zip(x.detach().cpu(), labels, strict=True):
        digest = hashlib.blake2b(f"{row.dtype} {tuple(row.shape)} {label}".encode(), digest_size=8)
        digest.update(_bytes_of(row))
        digests.append(int.from_bytes(digest.digest(), "big") >> 1 or 1)
    return torch.tensor(digests, dtype=torch.int64)
