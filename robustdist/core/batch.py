"""Find input and target in a batch, and rebuild the batch with another input, never changing the user's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustdist.core.containers import (
    Key,
    describe,
    entries_of,
    entry_of,
    is_container,
    is_named,
    replaced,
    shown,
)
from robustdist.core.rows import taken
from robustdist.errors import UsageError

__all__ = ["BatchAdapter", "Key", "Located"]

#: Names under which data sets hand out images, in the order of preference.
INPUT_KEYS = ("pixel_values", "images", "image", "x", "inputs", "input")
TARGET_KEYS = ("labels", "label", "y", "targets", "target")


class Located(NamedTuple):
    """Input and target of a batch, and the paths that lead to them."""

    x: Tensor
    y: Any
    input_path: tuple[Key, ...]
    target_path: tuple[Key, ...]


class BatchAdapter:
    """Takes a batch apart and puts it together again.

    Understood without options: sequences whose first floating-point tensor is the input and whose next entry is the
    target; mappings and dataclasses with one of the usual names. Everything else is named by the user.

    Args:
        input_key: Key, attribute or position of the input; a path such as "labelled.0" reaches into nested batches.
        target_key: The same for the target.
        uint8: Whether images of integers from 0 to 255 may be the input, which no attack can follow.

    Example:
        >>> import torch
        >>> adapter = BatchAdapter()
        >>> batch = {"image": torch.zeros(2, 1), "label": torch.tensor([0, 1])}
        >>> adapter.locate(batch).input_path
        ('image',)
        >>> bool(adapter.replace(batch, torch.ones(2, 1))["image"].all()), bool(batch["image"].any())
        (True, False)
    """

    def __init__(self, input_key: Key | None = None, target_key: Key | None = None, *, uint8: bool = False) -> None:
        self.input_key = input_key
        self.target_key = target_key
        self.uint8 = uint8

    def locate(self, batch: Any) -> Located:
        """Return input and target of ``batch``.

        Raises:
            UsageError: If they cannot be told, or the input is not a floating-point tensor.
        """
        if isinstance(batch, Tensor):
            raise UsageError("the batch is a bare tensor without targets: let the loader return (input, target)")
        input_path = self._path(batch, self.input_key) if self.input_key is not None else self._guess_input(batch)
        x = self._get(batch, input_path, "input_key")
        if not self._fits(x):
            what = f"{x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(
                f"input_key={shown(input_path)!r} is a {what}, not a floating-point tensor: "
                "convert images to float, or name another entry"
            )
        target_path, y = self.target(batch, input_path)
        return Located(x, y, input_path, target_path)

    def copied(self, batch: Any, *paths: tuple[Key, ...]) -> Any:
        """Return a batch like ``batch`` with copies of the tensors at ``paths``; containers on the way are copied."""
        for path in paths:
            value = self._get(batch, path, "input_key")
            if isinstance(value, Tensor):
                batch = replaced(batch, path, value.clone())
        return batch

    def target(self, batch: Any, input_path: tuple[Key, ...]) -> tuple[tuple[Key, ...], Any]:
        """Return path and value of the target of ``batch``, whose input is at ``input_path``.

        Raises:
            UsageError: If it cannot be told.
        """
        if self.target_key is not None:
            return self.entry(batch, self.target_key, "target_key")
        path = self._guess_target(batch, input_path)
        return path, self._get(batch, path, "target_key")

    @classmethod
    def entry(cls, batch: Any, key: Key, option: str) -> tuple[tuple[Key, ...], Any]:
        """Return path and value of the entry of ``batch`` that the option called ``option`` names.

        Raises:
            UsageError: If there is none.
        """
        path = cls._path(batch, key)
        return path, cls._get(batch, path, option)

    def replace(self, batch: Any, x: Tensor) -> Any:
        """Return a batch like ``batch`` with the input ``x``; containers on the way are copied, tensors are shared."""
        return replaced(batch, self.locate(batch).input_path, x)

    def replace_target(self, batch: Any, y: Any) -> Any:
        """Return a batch like ``batch`` with the target ``y``; containers on the way are copied."""
        return replaced(batch, self.locate(batch).target_path, y)

    def take(self, batch: Any, rows: Tensor) -> Any:
        """Return a batch like ``batch`` with the samples numbered ``rows``, in that order.

        Raises:
            UsageError: If an entry cannot be cut, as :func:`robustdist.core.rows.taken` says.
        """
        x, _, *paths = self.locate(batch)
        return taken(batch, rows, len(x), *paths)

    @staticmethod
    def _path(batch: Any, key: Key) -> tuple[Key, ...]:
        # names such as "image.png" or "0" stand for themselves where the batch has them
        if isinstance(key, int) or (isinstance(batch, Mapping) and key in batch):
            return (key,)
        return tuple(int(part) if part.removeprefix("-").isdecimal() else part for part in key.split("."))

    @staticmethod
    def _get(batch: Any, path: tuple[Key, ...], option: str) -> Any:
        try:
            return functools.reduce(entry_of, path, batch)
        except (KeyError, IndexError, TypeError, AttributeError):
            described = ", ".join(describe(batch)) or "no entries"
            raise UsageError(f"{option}={shown(path)!r} is not in the batch: it has {described}") from None

    def _fits(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.is_floating_point() or (self.uint8 and value.dtype == torch.uint8))

    def _guess_input(self, batch: Any) -> tuple[Key, ...]:
        entries = entries_of(batch)
        described = ", ".join(describe(batch)) or "no entries"
        nested = [key for key, value in entries if is_container(value)]
        if nested:
            pair = _pair_of_tensors(batch)
            example = "" if pair is None else f", for example input_key={pair[0]!r} and target_key={pair[1]!r}"
            raise UsageError(f"the batch is nested ({described}): name the tensors, those inside by a path{example}")
        floating = [key for key, value in entries if self._fits(value)]
        if not floating and self.uint8:
            raise UsageError(f"the batch has no image, of floats or of uint8 ({described}): name it with input_key")
        if not floating:
            raise UsageError(
                f"the batch has no floating-point tensor to attack ({described}): "
                "convert images to float in [0, 1], name the entry with input_key, or set space=Embeddings() for ids"
            )
        if not is_named(batch):
            if len(floating) > 1:
                raise UsageError(
                    f"the batch has several floating-point tensors ({described}): "
                    "name input and target with input_key and target_key, for example 0 and 1"
                )
            return (floating[0],)
        known = [key for key in INPUT_KEYS if key in floating]
        if len(known) == 1:
            return (known[0],)
        if not known and len(floating) == 1:
            return (floating[0],)
        raise UsageError(f"which entry of the batch is the input is ambiguous ({described}): name it with input_key")

    def _guess_target(self, batch: Any, input_path: tuple[Key, ...]) -> tuple[Key, ...]:
        described = ", ".join(describe(batch))
        entries = entries_of(batch)
        if not is_named(batch):
            if len(input_path) == 1 and isinstance(input_path[0], int):
                following = input_path[0] + 1
                if 0 < following < len(entries):
                    return (following,)
            raise UsageError(f"the batch has no entry after the input ({described}): name the target with target_key")
        keys = [key for key, _ in entries]
        known = [key for key in TARGET_KEYS if key in keys and (key,) != input_path]
        if len(known) == 1:
            return (known[0],)
        problem = "several entries could be the target" if known else "no entry looks like a target"
        raise UsageError(f"{problem} ({described}): name it with target_key")


def _pair_of_tensors(batch: Any) -> tuple[str, str] | None:
    """Return the paths of the first two tensors of the outermost container that has as many."""
    waiting: list[tuple[Key, ...]] = [()]
    for path in waiting:
        entries = entries_of(functools.reduce(entry_of, path, batch))
        tensors = [shown((*path, key)) for key, value in entries if isinstance(value, Tensor)]
        if len(tensors) > 1:
            return tensors[0], tensors[1]
        waiting += [(*path, key) for key, value in entries if is_container(value)]
    return None
