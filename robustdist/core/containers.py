"""Read and rebuild containers of any kind: tuples, lists, mappings, named tuples, dataclasses, attributes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from robustdist.errors import UsageError

__all__ = [
    "Key",
    "describe",
    "entries_of",
    "entry_of",
    "is_container",
    "is_named",
    "is_plain_sequence",
    "leaves",
    "replaced",
    "shown",
]

#: A key, an attribute or a position.
Key = str | int


def is_named(batch: Any) -> bool:
    """Return whether entries have names: mappings and dataclasses."""
    return isinstance(batch, Mapping) or dataclasses.is_dataclass(batch)


def is_container(value: Any) -> bool:
    """Return whether there is a tensor somewhere inside."""
    if isinstance(value, (str, bytes, type)):
        return False
    if not isinstance(value, (Mapping, Sequence)) and not dataclasses.is_dataclass(value):
        return False
    return any(isinstance(item, Tensor) or is_container(item) for _, item in entries_of(value))


def is_plain_sequence(value: Any) -> bool:
    """Return whether ``value`` is a list or tuple without names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def entries_of(batch: Any) -> list[tuple[Any, Any]]:
    """Return keys and values.

    Raises:
        UsageError: If ``batch`` is no container.
    """
    if isinstance(batch, Mapping):
        return list(batch.items())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return list(enumerate(batch))
    raise UsageError(
        f"a batch of type {type(batch).__name__} is not understood: "
        "let the loader return a tuple, list, dict, named tuple or dataclass, "
        "or name its attributes with input_key and target_key"
    )


def describe(batch: Any) -> list[str]:
    """Return one text per entry: its key, and type and shape of its value."""
    texts = []
    for key, value in entries_of(batch):
        what = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else None
        texts.append(f"{key}: {what or type(value).__name__}")
    return texts


def leaves(value: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """Yield path and value of everything in a batch that holds nothing itself: tensors, numbers, texts, None."""
    if isinstance(value, (str, bytes)) or not (isinstance(value, (Mapping, Sequence)) or is_named(value)):
        yield path, value
        return
    for key, item in entries_of(value):
        yield from leaves(item, (*path, key))


def shown(path: tuple[Key, ...]) -> str:
    """Return a path as the user writes it."""
    return ".".join(str(part) for part in path)


def entry_of(container: Any, key: Key) -> Any:
    """Return one entry; raises what the container raises where it is missing."""
    if isinstance(container, Mapping):
        if key not in container:  # a default dictionary would make the entry
            raise KeyError(key)
        return container[key]
    if isinstance(key, str):
        return getattr(container, key)
    if isinstance(container, Tensor):
        raise TypeError("a path ends at a tensor")
    return container[key]


def replaced(container: Any, path: tuple[Key, ...], x: Any) -> Any:
    """Return a container like ``container`` with ``x`` at ``path``; containers on the way are copied.

    Raises:
        UsageError: If a container on the way cannot be copied and changed.
    """
    if not path:
        return x
    key, rest = path[0], path[1:]
    value = replaced(entry_of(container, key), rest, x)
    if hasattr(container, "_replace") and hasattr(container, "_fields"):
        return container._replace(**{key if isinstance(key, str) else container._fields[key]: value})
    if hasattr(container, "__setitem__") or (isinstance(key, str) and not isinstance(container, Mapping)):
        # a shallow copy keeps the type of Hugging Face's BatchEncoding and of ordered or default dictionaries, and
        # does not run a dataclass's __post_init__ once more
        return _changed_copy(container, key, value)
    if isinstance(container, Mapping):
        return type(container)({**container, key: value})  # type: ignore[call-arg]
    items = list(container)
    items[int(key)] = value
    return type(container)(items)


def _changed_copy(container: Any, key: Key, value: Any) -> Any:
    before = entry_of(container, key)
    copied = copy.copy(container)
    try:
        _write(copied, key, value)
    except (AttributeError, TypeError):
        raise UsageError(
            f"{key!r} cannot be replaced in a batch of type {type(container).__name__}: "
            "name an entry that can be set with input_key, or let the loader return a dict"
        ) from None
    if entry_of(container, key) is not before:
        _write(container, key, before)
        raise UsageError(
            f"copy.copy of a batch of type {type(container).__name__} shares its entries with the original: "
            "give the class a __copy__, or let the loader return a dict"
        )
    return copied


def _write(container: Any, key: Key, value: Any) -> None:
    if isinstance(container, Mapping) or isinstance(key, int):
        container[key] = value
    elif dataclasses.is_dataclass(container):
        object.__setattr__(container, key, value)  # also a frozen one
    else:
        setattr(container, key, value)
