"""Cut a batch down to some of its samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from robustdist.core.containers import Key, entries_of, is_container, is_named, is_plain_sequence, replaced, shown
from robustdist.errors import UsageError

__all__ = ["taken"]

Path = tuple[Key, ...]


def taken(batch: Any, rows: Tensor, size: int, *paths: Path) -> Any:
    """Return a batch like ``batch`` with some of its samples.

    Tensors, arrays, lists and tuples with one entry per sample are cut; scalars, texts and None say something about
    the whole batch and stay. Containers are copied, never changed.

    Args:
        batch: Any container.
        rows: Numbers of the samples, shape (samples,), integers.
        size: Number of samples in ``batch``.
        *paths: Where input and target are: a list on the way to them is a list of entries, not of samples.

    Raises:
        UsageError: If an entry has another number of rows, or is of a kind that cannot be cut.
    """
    return _Cut(rows, size, paths).cut(batch, ())


class _Cut:
    def __init__(self, rows: Tensor, size: int, paths: tuple[Path, ...]) -> None:
        self.rows, self.size = rows, size
        self.inner = {path[:length] for path in paths for length in range(len(path))}

    def cut(self, value: Any, path: Path) -> Any:
        if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
            return value
        if isinstance(value, Tensor):
            return value if value.dim() == 0 else self._sized(value, path)[self.rows.to(value.device)]
        if hasattr(value, "shape"):  # an array of numpy
            return value if value.shape == () else self._sized(value, path)[self.rows.tolist()]
        if path not in self.inner and is_plain_sequence(value):
            if self._holds_samples(value, path):
                return type(value)(value[row] for row in self.rows.tolist())
            if not is_container(value):
                raise self._refusal(path, f"is a {type(value).__name__} of {len(value)}")
        return self._entries(value, path)

    def _entries(self, value: Any, path: Path) -> Any:
        if is_container(value) or is_named(value):
            entries = entries_of(value)
        elif path in self.inner:
            entries = list(vars(value).items())  # an object whose attributes the user named
        else:
            raise self._refusal(path, f"is of type {type(value).__name__}")
        result = value
        for key, item in entries:
            part = self.cut(item, (*path, key))
            if part is not item:
                result = replaced(result, (key,), part)
        return result

    def _holds_samples(self, value: list[Any] | tuple[Any, ...], path: Path) -> bool:
        whole = len(value) > 0 and all(isinstance(item, Tensor) and item.shape[:1] == (self.size,) for item in value)
        if whole and len(value) == self.size:
            raise self._refusal(path, f"could hold {self.size} samples or {self.size} tensors with one row per sample")
        return len(value) == self.size and not whole

    def _sized(self, value: Any, path: Path) -> Any:
        if value.shape[0] != self.size:
            raise self._refusal(path, f"has shape {tuple(value.shape)}")
        return value

    def _refusal(self, path: Path, what: str) -> UsageError:
        return UsageError(
            f"the batch cannot be cut to some of its {self.size} samples: its entry {shown(path)!r} {what}; "
            "let the loader return tensors or lists with one row per sample"
        )
