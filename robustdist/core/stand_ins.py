"""Attributes of modules that others stand in for during a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

__all__ = ["StandIns", "stand_ins"]

#: What stands in for which attribute of which module.
StandIns: TypeAlias = Mapping[tuple[nn.Module, str], Any]

_ABSENT = object()


@contextmanager
def stand_ins(values: StandIns) -> Iterator[None]:
    """Let ``values`` stand in for attributes of modules inside the context.

    They are put into the instance's own dictionary, where Python looks before ``nn.Module`` is asked for a parameter, a
    buffer or the class for a method. So the registered parameters and buffers are never touched: an optimiser, a
    distributed wrapper, ``state_dict`` and every module that shares one of them see nothing.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (owner, name), value in values.items():
            attributes = vars(owner)
            before.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value
        yield
    finally:
        for attributes, name, value in reversed(before):
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value
