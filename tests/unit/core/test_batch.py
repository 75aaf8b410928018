"""Taking batches of every kind apart and putting them together again."""

from __future__ import annotations

import copy
import dataclasses
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from robustdist.core.batch import INPUT_KEYS, TARGET_KEYS, BatchAdapter
from robustdist.errors import UsageError

X = torch.rand(4, 3)
Y = torch.tensor([0, 1, 2, 1])
INDEX = torch.arange(4)
NEW = X + 1


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclasses.dataclass
class Record:
    images: Tensor
    labels: Tensor
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    images: Tensor
    labels: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    images: Tensor
    labels: Tensor


class Encoding(UserDict):
    """As Hugging Face's BatchEncoding: a UserDict with attributes beside its data."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class Tagged(dict):
    tag = None


class TupleKind(tuple):
    pass


class ListKind(list):
    pass


class Slotted:
    __slots__ = ("images", "labels")

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels


def tagged() -> Tagged:
    batch = Tagged(x=X, y=Y)
    batch.tag = "kept"
    return batch


def defaults() -> defaultdict[str, Any]:
    return defaultdict(list, image=X, label=Y)


Path = tuple[str | int, ...]
# batch, path to its input, path to its target; found without options
PLAIN: dict[str, tuple[Callable[[], Any], Path, Path]] = {
    "list": (lambda: [X, Y], (0,), (1,)),
    "tuple": (lambda: (X, Y), (0,), (1,)),
    "list-subclass": (lambda: ListKind([X, Y]), (0,), (1,)),
    "tuple-subclass": (lambda: TupleKind([X, Y]), (0,), (1,)),
    "deque": (lambda: deque([X, Y], maxlen=7), (0,), (1,)),
    "user-list": (lambda: UserList([X, Y]), (0,), (1,)),
    "index-first": (lambda: (INDEX, X, Y), (1,), (2,)),
    "more-behind": (lambda: [X, Y, INDEX, "name"], (0,), (1,)),
    "names-first": (lambda: (["a", "b"], X, Y), (1,), (2,)),
    "namedtuple": (lambda: Pair(X, Y), (0,), (1,)),
    "dict": (lambda: {"image": X, "label": Y}, ("image",), ("label",)),
    "ordered": (lambda: OrderedDict(label=Y, image=X), ("image",), ("label",)),
    "default": (defaults, ("image",), ("label",)),
    "dict-subclass": (tagged, ("x",), ("y",)),
    "encoding": (lambda: Encoding({"pixel_values": X, "labels": Y}, ["e"]), ("pixel_values",), ("labels",)),
    "read-only": (lambda: MappingProxyType({"x": X, "y": Y}), ("x",), ("y",)),
    "chain": (lambda: ChainMap({"x": X}, {"y": Y}), ("x",), ("y",)),
    "dataclass": (lambda: Record(X, Y), ("images",), ("labels",)),
    "frozen": (lambda: Frozen(X, Y), ("images",), ("labels",)),
    "frozen-slots": (lambda: FrozenSlots(X, Y), ("images",), ("labels",)),
}
# batch, input_key, target_key, the two paths; named by the user
NAMED: dict[str, tuple[Callable[[], Any], str | int, str | int, Path, Path]] = {
    "positions": (lambda: [X, X + 2, Y], 1, 2, (1,), (2,)),
    "positions-as-text": (lambda: [X, X + 2, Y], "1", "2", (1,), (2,)),
    "from-behind": (lambda: (Y, X), -1, 0, (-1,), (0,)),
    "from-behind-as-text": (lambda: (Y, X), "-1", "-2", (-1,), (-2,)),
    "namedtuple-by-name": (lambda: Pair(X, Y), "image", "label", ("image",), ("label",)),
    "namedtuple-from-behind": (lambda: Pair(X, Y), -2, -1, (-2,), (-1,)),
    "integer-keys": (lambda: {0: X, 1: Y}, 0, 1, (0,), (1,)),
    "digit-keys": (lambda: {"0": X, "1": Y}, "0", "1", ("0",), ("1",)),
    "dotted-keys": (lambda: {"a.png": X, "a.cls": Y}, "a.png", "a.cls", ("a.png",), ("a.cls",)),
    "other-names": (lambda: {"pic": X, "what": Y}, "pic", "what", ("pic",), ("what",)),
    "soft-targets": (lambda: (X, X + 2), 0, 1, (0,), (1,)),
    "target-before-input": (lambda: [Y, X], 1, 0, (1,), (0,)),
    "nested-in-dict": (lambda: {"a": [X, Y], "b": INDEX}, "a.0", "a.1", ("a", 0), ("a", 1)),
    "nested-in-tuple": (lambda: ({"v": X}, (Y, INDEX)), "0.v", "1.0", (0, "v"), (1, 0)),
    "nested-twice": (lambda: [[INDEX, [Y, X]]], "0.1.1", "0.1.0", (0, 1, 1), (0, 1, 0)),
    "nested-dataclass": (lambda: [Frozen(X, Y), INDEX], "0.images", "0.labels", (0, "images"), (0, "labels")),
    "nested-namedtuple": (lambda: {"a": Pair(X, Y)}, "a.image", "a.1", ("a", "image"), ("a", 1)),
    "object": (lambda: SimpleNamespace(images=X, labels=Y, other=1), "images", "labels", ("images",), ("labels",)),
    "slotted-object": (lambda: Slotted(X, Y), "images", "labels", ("images",), ("labels",)),
    "target-is-no-tensor": (lambda: {"x": X, "boxes": [{"b": Y}]}, "x", "boxes", ("x",), ("boxes",)),
}
ALL = {name: (make, None, None, x, y) for name, (make, x, y) in PLAIN.items()} | NAMED


@pytest.fixture(params=ALL.values(), ids=ALL.keys())
def case(request) -> tuple[Callable[[], Any], str | int | None, str | int | None, Path, Path]:
    return request.param


def walk(batch: Any, path: Path) -> Any:
    """Follow a path without the code under test."""
    for key in path:
        batch = batch[key] if isinstance(key, int) or isinstance(batch, Mapping) else getattr(batch, key)
    return batch


def leaves(value: Any) -> Any:
    """Plain containers with the identity of every tensor in the place of the tensor."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, Mapping):
        return {key: leaves(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, deque, UserList)):
        return [leaves(entry) for entry in value]
    if isinstance(value, (Record, Frozen, FrozenSlots, Slotted)):
        names = value.__slots__ if hasattr(value, "__slots__") else vars(value)
        return {name: leaves(getattr(value, name)) for name in names}
    return leaves(vars(value)) if isinstance(value, SimpleNamespace) else value


# --- what is understood


def test_input_and_target_are_found(case):
    make, input_key, target_key, input_path, target_path = case
    batch = make()
    found = BatchAdapter(input_key, target_key).locate(batch)
    assert (found.input_path, found.target_path) == (input_path, target_path)
    assert found.x is walk(batch, input_path)
    assert found.y is walk(batch, target_path)


def test_the_copy_differs_in_the_input_alone(case):
    make, input_key, target_key, input_path, target_path = case
    batch = make()
    before = leaves(batch)
    old = walk(batch, input_path)
    replaced = BatchAdapter(input_key, target_key).replace(batch, NEW)
    assert leaves(batch) == before, "the user's batch was changed"
    assert replaced is not batch
    assert type(replaced) is type(batch)
    assert walk(replaced, input_path) is NEW
    assert walk(replaced, target_path) is walk(batch, target_path)
    assert str(leaves(replaced)) == str(before).replace(str(id(old)), str(id(NEW)))


def test_replacing_twice_reads_the_same_places(case):
    make, input_key, target_key, input_path, _ = case
    adapter = BatchAdapter(input_key, target_key)
    once = adapter.replace(make(), NEW)
    assert walk(adapter.replace(once, X), input_path) is X
    assert walk(once, input_path) is NEW


def test_only_containers_on_the_way_are_copied():
    batch = {"a": [X, Y], "b": [INDEX], "c": {"d": 1}}
    replaced = BatchAdapter("a.0", "a.1").replace(batch, NEW)
    assert replaced["a"] is not batch["a"]
    assert replaced["b"] is batch["b"]
    assert replaced["c"] is batch["c"]


def test_special_containers_keep_what_makes_them_special():
    adapter = BatchAdapter()
    assert adapter.replace(defaults(), NEW)["fresh"] == []
    assert list(adapter.replace(OrderedDict(label=Y, image=X), NEW)) == ["label", "image"]
    assert adapter.replace(tagged(), NEW).tag == "kept"
    assert adapter.replace(Encoding({"x": X, "y": Y}, "e"), NEW).encodings == "e"
    assert adapter.replace(deque([X, Y], maxlen=7), NEW).maxlen == 7
    assert adapter.replace(Record(X, Y, name="b"), NEW).name == "b"


@pytest.mark.parametrize("key", INPUT_KEYS)
def test_every_usual_input_name_is_known(key):
    assert BatchAdapter().locate({"mask": torch.rand(2), key: X, "label": Y}).input_path == (key,)


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_every_usual_target_name_is_known(key):
    assert BatchAdapter().locate({"image": X, "ids": INDEX, key: Y}).target_path == (key,)


def test_the_only_floating_entry_of_a_mapping_is_the_input():
    assert BatchAdapter().locate({"picture": X, "label": Y}).input_path == ("picture",)


def test_one_key_may_be_named_and_the_other_guessed():
    batch = {"front": X, "rear": X + 2, "label": Y}
    assert BatchAdapter(input_key="rear").locate(batch).target_path == ("label",)
    assert BatchAdapter(target_key="ids").locate({"image": X, "label": Y, "ids": INDEX}).input_path == ("image",)
    assert BatchAdapter(input_key=1).locate((X, X + 2, Y)).target_path == (2,)


def test_a_target_that_is_the_input_is_not_guessed():
    assert BatchAdapter(input_key="y").locate({"y": X, "label": Y}).target_path == ("label",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_dtype_is_an_input(dtype):
    assert BatchAdapter().locate((X.to(dtype), Y)).x.dtype == dtype


# --- the original is never mutated


def test_a_dataclass_is_not_initialised_again():
    @dataclasses.dataclass
    class Scaled:
        images: Tensor
        labels: Tensor
        factor: dataclasses.InitVar[float]
        derived: Any = dataclasses.field(init=False, default=None)

        def __post_init__(self, factor: float) -> None:
            self.images = self.images * factor

    batch = Scaled(X, Y, 0.5)
    batch.derived = "set later"
    replaced = BatchAdapter().replace(batch, NEW)
    assert replaced.images is NEW
    assert replaced.derived == "set later"


def test_a_dataclass_field_outside_init_can_be_the_input():
    @dataclasses.dataclass
    class Lazy:
        labels: Tensor
        images: Any = dataclasses.field(init=False)

    batch = Lazy(Y)
    batch.images = X
    assert BatchAdapter().replace(batch, NEW).images is NEW
    assert batch.images is X


def test_looking_for_a_key_makes_no_entry_in_a_default_dictionary():
    batch = defaults()
    with pytest.raises(UsageError, match="input_key='picture'"):
        BatchAdapter(input_key="picture").locate(batch)
    assert list(batch) == ["image", "label"]


class Sharing(MutableMapping):
    """Its shallow copy writes into the original."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_a_batch_whose_copy_shares_its_entries_is_refused_unchanged():
    batch = Sharing(x=X, y=Y)
    with pytest.raises(UsageError, match="__copy__"):
        BatchAdapter().replace(batch, NEW)
    assert batch["x"] is X


def test_the_same_batch_with_a_copy_of_its_own_works():
    class Separate(Sharing):
        def __copy__(self) -> Separate:
            return Separate(**self.entries)

    batch = Separate(x=X, y=Y)
    assert BatchAdapter().replace(batch, NEW)["x"] is NEW
    assert batch["x"] is X


def test_an_attribute_that_cannot_be_set_is_refused():
    class ReadOnly:
        labels = Y

        @property
        def images(self) -> Tensor:
            return X

    with pytest.raises(UsageError, match="'images' cannot be replaced in a batch of type ReadOnly"):
        BatchAdapter("images", "labels").replace(ReadOnly(), NEW)


# --- what is refused, and what the message says

TWO_FLOATS = {"left": X, "right": X, "label": Y}
Odd = namedtuple("Odd", "a b")
REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "bare-tensor": (X, {}, ("bare tensor", "(input, target)")),
    "bare-tensor-with-keys": (X, {"input_key": 0, "target_key": 1}, ("bare tensor",)),
    "two-floats": ((X, X), {}, ("several floating-point tensors", "float32[4, 3]", "input_key", "target_key")),
    "two-floats-in-dict": (TWO_FLOATS, {}, ("ambiguous", "left", "right", "input_key")),
    "two-usual-names": ({"x": X, "image": X, "y": Y}, {}, ("ambiguous", "input_key")),
    "integers": ((INDEX, Y), {}, ("no floating-point tensor", "int64[4]", "input_key")),
    "bytes-image": ({"image": X.byte(), "label": Y}, {}, ("no floating-point tensor", "uint8[4, 3]", "input_key")),
    "named-bytes-image": ((X.byte(), Y), {"input_key": 0, "target_key": 1}, ("input_key='0'", "uint8", "float")),
    "input-is-no-tensor": ({"x": "name", "y": Y}, {"input_key": "x"}, ("input_key='x'", "str")),
    "input-is-a-number": ((0.5, Y), {"input_key": 0}, ("input_key='0'", "float,")),
    "nested-tuple": (((X, Y), INDEX), {}, ("nested", "input_key='0.0'", "target_key='0.1'")),
    "nested-dict": ({"labelled": [X, Y]}, {}, ("nested", "input_key='labelled.0'")),
    "nested-dataclass": ((Frozen(X, Y), X, Y), {}, ("nested", "input_key", "target_key")),
    "nested-deeper": ({"a": {"b": [X, Y]}}, {}, ("nested", "input_key='a.b.0' and target_key='a.b.1'")),
    "nested-beside": ((X, Y, {"w": X}), {}, ("nested", "input_key='0' and target_key='1'")),
    "nested-single": ([{"w": X}], {}, ("nested", "by a path")),
    "input-last": ((Y, X), {}, ("no entry after the input", "target_key")),
    "single": ([X], {}, ("no entry after the input", "target_key")),
    "no-target-name": ({"x": X, "idx": Y}, {}, ("no entry looks like a target", "idx: int64[4]", "target_key")),
    "two-targets": ({"x": X, "y": Y, "label": Y}, {}, ("several entries could be the target", "target_key")),
    "missing-input": ({"x": X, "y": Y}, {"input_key": "image"}, ("input_key='image'", "x: float32[4, 3]")),
    "missing-target": ({"x": X, "y": Y}, {"target_key": "cls"}, ("target_key='cls'", "y: int64[4]")),
    "position-too-large": ((X, Y), {"input_key": 0, "target_key": 2}, ("target_key='2'",)),
    "name-in-a-tuple": ((X, Y), {"input_key": "image"}, ("input_key='image'", "0: float32[4, 3]")),
    "position-in-a-dict": ({"x": X, "y": Y}, {"input_key": 0}, ("input_key='0'", "x: float32")),
    "path-too-long": ((X, Y), {"input_key": "0.1", "target_key": 1}, ("input_key='0.1'",)),
    "path-through-nothing": ({"x": X, "y": None}, {"target_key": "y.0"}, ("target_key='y.0'",)),
    "empty-key": ({"x": X, "y": Y}, {"input_key": ""}, ("input_key=''",)),
    "odd-number": ((X, Y), {"input_key": "--1"}, ("input_key='--1'",)),
    "odd-digit": ((X, Y), {"input_key": "²"}, ("input_key='²'",)),
    "empty-list": ([], {}, ("no entries", "input_key")),
    "empty-dict": ({}, {}, ("no entries", "input_key")),
    "empty-list-with-keys": ([], {"input_key": 0}, ("input_key='0'", "no entries")),
    "none": (None, {}, ("NoneType", "input_key", "target_key")),
    "number": (7, {}, ("int", "input_key", "target_key")),
    "text": ("batch", {}, ("str", "input_key", "target_key")),
    "set": ({1, 2}, {}, ("set", "input_key", "target_key")),
    "object": (SimpleNamespace(x=X, y=Y), {}, ("SimpleNamespace", "input_key", "target_key")),
    "object-without-it": (SimpleNamespace(x=X), {"input_key": "image"}, ("SimpleNamespace", "input_key")),
    "class": (Record, {}, ("type", "input_key", "target_key")),
}


@pytest.mark.parametrize(("batch", "keys", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_told_is_refused_with_the_remedy(batch, keys, words):
    adapter = BatchAdapter(**keys)
    before = leaves(batch) if isinstance(batch, (dict, list, tuple)) else None
    for attempt in (adapter.locate, lambda batch: adapter.replace(batch, NEW)):
        with pytest.raises(UsageError) as refusal:
            attempt(batch)
        message = str(refusal.value)
        assert [word for word in words if word not in message] == [], message
        assert "\n" not in message
    assert (leaves(batch) if before is not None else None) == before


def test_adapters_can_be_copied():
    adapter = copy.deepcopy(BatchAdapter("a.0", "a.1"))
    assert (adapter.input_key, adapter.target_key) == ("a.0", "a.1")
