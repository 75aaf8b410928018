"""Some samples of a batch: everything with one row per sample is cut, nothing of the user's changes."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robustdist.core.batch import BatchAdapter
from robustdist.errors import UsageError

X, Y = torch.rand(5, 1, 2, 2), torch.tensor([3, 1, -1, 0, 2])
NAMES = ["a", "b", "c", "d", "e"]
ROWS = torch.tensor([4, 0, 2])


@dataclasses.dataclass
class Record:
    images: Tensor
    labels: Tensor
    names: list[str]


Pair = namedtuple("Pair", ["x", "y"])

BATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tuple": ((X, Y), {}),
    "list": ([X, Y, NAMES], {}),
    "named tuple": (Pair(X, Y), {}),
    "dict": ({"image": X, "label": Y, "name": NAMES, "epoch": 3, "about": {"source": "web"}, "weight": None}, {}),
    "ordered": (OrderedDict(image=X, label=Y, temperature=torch.tensor(2.0)), {}),
    "user dict": (UserDict(x=X, y=Y), {}),
    "dataclass": (Record(X, Y, NAMES), {}),
    "nested": ({"labelled": [X, Y], "extra": {"index": torch.arange(5), "both": (X, Y)}},
               {"input_key": "labelled.0", "target_key": "labelled.1"}),
    "attributes": (SimpleNamespace(pixels=X, truth=Y, meta=tuple(NAMES)),
                   {"input_key": "pixels", "target_key": "truth"}),
    "arrays": ([X, Y, np.arange(5), np.float64(3.0)], {}),
    "ragged": ([X, Y, [torch.rand(size) for size in (1, 2, 3, 4, 5)]], {"input_key": 0, "target_key": 1}),
    "groups": ([X, Y, [X, Y]], {"input_key": 0, "target_key": 1}),
}  # fmt: skip


def naive(value: Any) -> Any:
    """Return what is left of an entry, row by row."""
    if isinstance(value, (Tensor, np.ndarray)) and value.shape[:1] == (5,):
        return [value[row] for row in ROWS.tolist()]
    if isinstance(value, (list, tuple)) and len(value) == 5:
        return [value[row] for row in ROWS.tolist()]
    return value


def assert_cut(cut: Any, whole: Any) -> None:
    assert type(cut) is type(whole)
    if isinstance(whole, (Tensor, np.ndarray)) and whole.shape[:1] == (5,):
        assert len(cut) == 3
        assert all(bool((one == other).all()) for one, other in zip(cut, naive(whole), strict=True))
    elif isinstance(whole, (list, tuple)) and len(whole) == 5 and not hasattr(whole, "_fields"):
        assert list(cut) == naive(whole)
    elif isinstance(whole, (dict, UserDict)):
        assert list(cut) == list(whole)
        for key in whole:
            assert_cut(cut[key], whole[key])
    elif isinstance(whole, (list, tuple)):
        assert len(cut) == len(whole)
        for one, other in zip(cut, whole, strict=True):
            assert_cut(one, other)
    elif hasattr(whole, "__dict__"):
        for key, value in vars(whole).items():
            assert_cut(getattr(cut, key), value)
    else:
        assert cut is whole


@pytest.mark.parametrize(("batch", "keys"), BATCHES.values(), ids=BATCHES)
def test_every_entry_is_cut_in_the_order_of_the_rows(batch, keys):
    adapter = BatchAdapter(**keys)
    before = copy.deepcopy(batch)
    cut = adapter.take(batch, ROWS)
    assert_cut(cut, batch)
    assert str(batch) == str(before)
    located = adapter.locate(cut)
    assert torch.equal(located.x, X[ROWS])
    assert torch.equal(located.y, Y[ROWS])


@pytest.mark.parametrize(("batch", "keys"), BATCHES.values(), ids=BATCHES)
def test_all_rows_are_the_batch_and_parts_of_parts_are_parts(batch, keys):
    adapter = BatchAdapter(**keys)
    whole = adapter.locate(adapter.take(batch, torch.arange(5)))
    assert torch.equal(whole.x, X)
    twice = adapter.locate(adapter.take(adapter.take(batch, ROWS), torch.tensor([2, 1])))
    assert torch.equal(twice.x, X[[2, 0]])
    assert twice.y.tolist() == [-1, 3]


@pytest.mark.parametrize(("batch", "keys"), BATCHES.values(), ids=BATCHES)
def test_the_target_can_be_replaced(batch, keys):
    adapter = BatchAdapter(**keys)
    before = copy.deepcopy(batch)
    changed = adapter.locate(adapter.replace_target(batch, Y + 1))
    assert torch.equal(changed.y, Y + 1)
    assert changed.x is X
    assert str(batch) == str(before)


def test_a_batch_of_as_many_entries_as_samples_is_a_batch():
    x, y = X[:2], Y[:2]
    cut = BatchAdapter().take([x, y], torch.tensor([1]))
    assert torch.equal(cut[0], x[1:])
    assert torch.equal(cut[1], y[1:])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (torch.rand(4, 2), "'2' has shape (4, 2)"),
        (np.zeros((3, 5)), "'2' has shape (3, 5)"),
        (["a", "b"], "'2' is a list of 2"),
        ({"more": torch.rand(7)}, "'2.more' has shape (7,)"),
        (object(), "'2' is of type object"),
        ([X] * 5, "'2' could hold 5 samples or 5 tensors"),
    ],
)
def test_what_cannot_be_cut_is_named(entry, words):
    with pytest.raises(UsageError) as caught:
        BatchAdapter(0, 1).take([X, Y, entry], ROWS)
    message = str(caught.value)
    assert words in message
    assert message.startswith("the batch cannot be cut to some of its 5 samples: its entry ")
    assert message.endswith("let the loader return tensors or lists with one row per sample")
    assert "\n" not in message
