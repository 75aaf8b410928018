"""FashionMNIST from its four original files."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from robustdist.data.base import ImageDataModule, Parts, as_dataset, stratified_split
from robustdist.errors import UsageError

__all__ = ["FashionMNISTDataModule"]

_ENVIRONMENT = "ROBUSTDIST_FASHION_MNIST"
_DEFAULT_ROOTS = ("/usr/share/datasets/fashion-mnist", "data/FashionMNIST/raw")
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UNSIGNED_BYTE = 0x08


class FashionMNISTDataModule(ImageDataModule):
    """The complete FashionMNIST: 10 classes, 1x28x28, 60,000 training images stratified into 55,000/5,000, 10,000 test.

    Reads the four original idx files, packed (.gz) or unpacked. They arrive with the Debian package
    dataset-fashion-mnist; a folder ``FashionMNIST/raw`` of torchvision holds the same files.

    Args:
        batch_size: Images per batch and process.
        num_workers: Worker processes per loader; 0 is fastest for data that lies in memory.
        seed: Seed of the split.
        root: Folder with the four files; default the environment variable ROBUSTDIST_FASHION_MNIST, else the first of
            /usr/share/datasets/fashion-mnist and ./data/FashionMNIST/raw that has them.
        num_train: Training images to use, a stratified choice; default all that validation leaves.
        num_val: Training images set aside for validation; the same ones whatever ``num_train``.

    Raises:
        UsageError: If an argument is out of range.
    """

    num_classes = 10
    input_shape = (1, 28, 28)

    def __init__(
        self,
        batch_size: int = 100,
        num_workers: int = 0,
        seed: int = 0,
        root: str | None = None,
        num_train: int | None = None,
        num_val: int = 5000,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        if num_val < 1:
            raise UsageError(f"num_val={num_val} must be at least 1")
        if num_train is not None and num_train < 1:
            raise UsageError(f"num_train={num_train} must be at least 1")
        self.root = root
        self.num_train = num_train
        self.num_val = num_val

    def load(self) -> Parts:
        """Read the four files and set the validation images aside.

        Raises:
            UsageError: If the files are missing or damaged, or fewer than ``num_train`` and ``num_val`` ask for.
        """
        train_images, train_labels, test_images, test_labels = _find_files(self.root)
        x, y = self._read_pair(train_images, train_labels)
        num_train = len(y) - self.num_val if self.num_train is None else self.num_train
        if num_train < 1 or num_train + self.num_val > len(y):
            raise UsageError(
                f"num_train={self.num_train} and num_val={self.num_val} ask for more than the {len(y)} training images "
                f"in root={train_images.parent}: reduce one of them"
            )
        val, train = stratified_split(y, (self.num_val, num_train), seed=self.seed)
        return Parts(
            train=as_dataset(x[train], y[train], white=255),
            val=as_dataset(x[val], y[val], white=255),
            test=as_dataset(*self._read_pair(test_images, test_labels), white=255),
        )

    def _read_pair(self, images: Path, labels: Path) -> tuple[Tensor, Tensor]:
        x, y = _read_idx(images), _read_idx(labels)
        _, *size = self.input_shape
        if list(x.shape) != [len(y), *size] or y.dim() != 1 or (y >= self.num_classes).any():
            raise UsageError(
                f"root={images.parent}: {images.name} of shape {tuple(x.shape)} and {labels.name} of shape "
                f"{tuple(y.shape)} are not images of 28x28 pixels with labels 0 to 9, one each: replace both files"
            )
        return x[:, None], y


def _find_files(root: str | None) -> list[Path]:
    chosen = root or os.environ.get(_ENVIRONMENT)
    candidates = (chosen,) if chosen else _DEFAULT_ROOTS
    for candidate in candidates:
        folder = Path(candidate).expanduser()
        # an unpacked file is found last and so preferred
        found = {name: path for name in _FILES for path in (folder / f"{name}.gz", folder / name) if path.is_file()}
        if len(found) == len(_FILES):
            return list(found.values())
    option = _ENVIRONMENT if chosen and not root else "root"
    raise UsageError(
        f"{option}={' or '.join(candidates)} does not hold all of {', '.join(_FILES)} (packed as .gz or not): "
        "install the Debian package dataset-fashion-mnist, or set root to the folder that has them"
    )


def _read_idx(path: Path) -> Tensor:
    """Return the array of bytes in an idx file: two zero bytes, type, number of axes, the sizes, the entries."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"root={path.parent}: {path.name} cannot be read ({error}): replace the file") from error
    header = 4 + 4 * data[3] if data[:3] == bytes((0, 0, _UNSIGNED_BYTE)) and len(data) > 3 else 0
    if not 4 < header <= len(data):
        raise UsageError(f"root={path.parent}: {path.name} is not an idx file of bytes: replace the file")
    shape = struct.unpack(f">{data[3]}I", data[4:header])
    if math.prod(shape) != len(data) - header:
        raise UsageError(
            f"root={path.parent}: {path.name} promises {math.prod(shape)} bytes but has {len(data) - header}: "
            "replace the file"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[header:].view(shape)
