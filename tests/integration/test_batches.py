"""The user's data and batch objects: nothing of them changes but the input that the step sees."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.objectives import DAT

from .support import Classifier, make_trainer


class Views(Dataset):
    """Hands out batches that are views of the storage of the whole data set."""

    def __init__(self, x, y, make=lambda x, y: (x, y)):
        self.x, self.y, self.make = x, y, make

    def __len__(self):
        return len(self.x) // 4

    def __getitem__(self, place):
        if place >= len(self):
            raise IndexError
        rows = slice(4 * place, 4 * place + 4)
        return self.make(self.x[rows], self.y[rows])


def views(x, y, make=lambda x, y: (x, y)):
    # torch's default would turn tuples into lists
    return DataLoader(Views(x, y, make), batch_size=None, collate_fn=lambda batch: batch)


@pytest.mark.parametrize("objective", [DAT(0.0), DAT(1.0)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_storage_of_the_data_set_is_not_written_to(launch, images, objective, precision):
    x, y = images(16)
    kept = x.clone(), y.clone()
    aliased = []

    class Watching(Classifier):
        def validation_step(self, batch, batch_idx):
            aliased.append(batch[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr())

    attack = PGD(eps=0.1, steps=2)
    module = Watching()
    launch(
        module,
        views(x, y),
        views(x, y),
        max_epochs=2,
        precision=precision,
        callbacks=[AdversarialTraining(objective, attack), RobustEvaluation({"pgd": attack})],
    )
    assert aliased == [True] * 8  # otherwise this test would show nothing
    adversarial = torch.cat(module.seen[:: 1 + int(objective.clean_weight)]).float()
    assert float((adversarial - torch.cat([x, x])).abs().max()) > 0.05
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


Named = namedtuple("Named", ["note", "picture", "truth"])


class Encoding(UserDict):
    """Like the batches of Hugging Face: a mapping with attributes and a method that moves it."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device):
        self.data = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in self.data.items()}
        return self


@dataclass
class Record:
    image: torch.Tensor
    label: torch.Tensor
    note: str
    times_made: list = field(default_factory=list)

    def __post_init__(self):
        self.times_made.append(1)
        self.image = self.image * 1.0 + (0.25 if len(self.times_made) > 1 else 0.0)


class Pair(list):
    """A list with something to say."""

    note = "kept"


KINDS = {
    "tuple": (lambda x, y: (x, y, "kept"), lambda b: (b[0], b[1], b[2])),
    "list": (lambda x, y: [x, y, "kept"], lambda b: (b[0], b[1], b[2])),
    "list subclass": (lambda x, y: Pair([x, y]), lambda b: (b[0], b[1], b.note)),
    "named tuple": (lambda x, y: Named("kept", x, y), lambda b: (b.picture, b.truth, b.note)),
    "dict": (lambda x, y: {"image": x, "label": y, "note": "kept"}, lambda b: (b["image"], b["label"], b["note"])),
    "ordered": (
        lambda x, y: OrderedDict(note="kept", pixel_values=x, labels=y),
        lambda b: (b["pixel_values"], b["labels"], b["note"]),
    ),
    "encoding": (
        lambda x, y: Encoding(pixel_values=x, labels=y, note="kept"),
        lambda b: (b.pixel_values, b.labels, b.note),
    ),
    "dataclass": (lambda x, y: Record(x, y, "kept"), lambda b: (b.image, b.label, b.note)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", [DAT(0.0), DAT(1.0)])
def test_every_kind_of_batch_arrives_as_itself(launch, images, kind, objective):
    make, take = KINDS[kind]
    x, y = images(16)
    plain = type(make(x, y))
    found = []

    class Taking(Classifier):
        def training_step(self, batch, batch_idx):
            image, label, note = take(batch)
            found.append((type(batch), note, image.detach().clone(), label))
            return F.cross_entropy(self(image), label)

        def validation_step(self, batch, batch_idx):
            note = take(batch)[2]
            assert type(batch) is plain
            assert note == "kept"

    attack = PGD(eps=0.0625, steps=2)
    launch(
        Taking(),
        views(x, y, make),
        views(x, y, make),
        callbacks=[AdversarialTraining(objective, attack), RobustEvaluation({"pgd": attack})],
    )

    passes = 1 + int(objective.clean_weight)
    assert len(found) == 4 * passes
    assert all(batch_type is plain and note == "kept" for batch_type, note, _, _ in found)
    assert torch.equal(torch.cat([label for *_, label in found[::passes]]), y)
    delta = torch.cat([image for _, _, image, _ in found[::passes]]) - x
    assert 0.05 < delta.abs().max() <= 0.0625 + 1e-6
    if passes == 2:
        assert torch.equal(torch.cat([image for _, _, image, _ in found[1::2]]), x)


def test_nested_batches_are_refused_with_the_path_that_makes_them_work(tmp_path, images):
    x, y = images(16)
    unlabelled, _ = images(16, seed=3)
    steps = []

    class Both(Classifier):
        def training_step(self, batch, batch_idx):
            (image, label), (other, _) = batch["labelled"], batch["unlabelled"]
            steps.append((image.detach().clone(), other.detach().clone()))
            return F.cross_entropy(self(image), label) + 0.0 * self(other).sum()

    def train(**options):
        attack = PGD(eps=0.0625, steps=2)
        trainer = make_trainer(callbacks=[AdversarialTraining(attack=attack, **options)], default_root_dir=tmp_path)
        trainer.fit(Both(), {"labelled": views(x, y), "unlabelled": views(unlabelled, y)})

    with pytest.raises(ValueError, match=r"nested.*input_key='labelled\.0' and target_key='labelled\.1'"):
        train()
    assert steps == []
    train(input_key="labelled.0", target_key="labelled.1")
    image, other = (torch.cat(parts) for parts in zip(*steps, strict=True))
    assert 0.05 < float((image - x).abs().max()) <= 0.0625 + 1e-6
    assert torch.equal(other, unlabelled)


def test_what_cannot_be_attacked_is_said_before_the_first_step(tmp_path, images):
    x, y = images(16)

    def train(data, **options):
        module = Classifier()
        callback = AdversarialTraining(attack=PGD(eps=0.1, steps=1), **options)
        trainer = make_trainer(callbacks=[callback], default_root_dir=tmp_path)
        try:
            trainer.fit(module, data)
        finally:
            assert module.seen == []
            assert "training_step" not in vars(trainer.strategy)

    with pytest.raises(ValueError, match="floating-point"):
        train(views((x * 255).byte(), y))
    with pytest.raises(ValueError, match="bounds"):
        train(views(x * 255, y))
    with pytest.raises(ValueError, match="attack_loss"):
        train(views(x, F.one_hot(y, 4).float(), lambda x, y: {"image": x, "label": y}))
    with pytest.raises(ValueError, match="input_key"):
        train(views(x, y), input_key="picture")
    with pytest.raises(ValueError, match="forward"):
        train(views(x, y), forward="network")
