"""Patches of the colour photographs in scikit-image and scikit-learn."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from robustdist.data.base import ImageDataModule, Parts, as_dataset, stratified_split
from robustdist.errors import UsageError

__all__ = ["PhotoPatchesDataModule"]

#: One class per photograph; the first eight lie in scikit-image, the others in scikit-learn.
_SKIMAGE = (
    "astronaut.png",
    "coffee.png",
    "chelsea.png",
    "retina.jpg",
    "rocket.jpg",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
)
_SKLEARN = ("china.jpg", "flower.jpg")
_SIZE = 32
_BLOCK = 80
#: Part of a block by (7 row + 3 column) mod 5: training, validation or test.
_PART = (0, 0, 0, 1, 2)
#: Patches per class in each part.
_PER_CLASS = (500, 50, 50)
_MAX_DRAWS = 1000
_LEAST_CONTRAST = 26


class PhotoPatchesDataModule(ImageDataModule):
    """Which photograph is this patch from? Ten classes, 3x32x32, 5000/500/500 patches of ten colour photographs.

    The photographs are cut into blocks of 80 pixels, three fifths for training and one each for validation and test,
    and a patch lies within one block: the parts share no pixel. The classes have no meaning, but the statistics of
    colour are those of photographs. This is not CIFAR, and its accuracies compare with nothing published. Patches whose
    brightest and darkest value differ by less than 0.1 (sky, the black rim of the retina) are left out.

    Needs scikit-image and scikit-learn: ``pip install 'robustdist[data]'``.

    Args:
        batch_size: Images per batch and process.
        num_workers: Worker processes per loader; 0 is fastest for data that lies in memory.
        seed: Seed of the places where patches are cut.
    """

    num_classes = 10
    input_shape = (3, 32, 32)

    def load(self) -> Parts:
        """Read the photographs and cut the patches.

        Raises:
            UsageError: If scikit-image or scikit-learn is not installed.
        """
        generator = torch.Generator().manual_seed(self.seed)
        photographs = [_read(path) for path in _paths()]
        parts = []
        for part, count in enumerate(_PER_CLASS):
            images = torch.stack([cut for photo in photographs for cut in _patches(photo, part, count, generator)])
            labels = torch.arange(len(photographs)).repeat_interleave(count)
            (order,) = stratified_split(labels, [len(labels)], seed=self.seed)
            parts.append(as_dataset(images[order], labels[order], white=255))
        return Parts(*parts)


def _paths() -> list[Path]:
    try:
        import skimage.data
        import sklearn.datasets
    except ImportError as error:
        raise UsageError(
            "PhotoPatchesDataModule needs scikit-image and scikit-learn: pip install 'robustdist[data]'"
        ) from error
    skimage_folder = Path(skimage.data.__file__).parent
    sklearn_folder = Path(sklearn.datasets.__file__).parent / "images"
    paths = [skimage_folder / name for name in _SKIMAGE] + [sklearn_folder / name for name in _SKLEARN]
    for path in paths:
        if not path.exists():
            raise UsageError(
                f"the installed packages lack the photograph {path.name}: "
                "install another release of scikit-image and scikit-learn, 0.26 and 1.7 have it"
            )
    return paths


def _read(path: Path) -> Tensor:
    """Return a photograph as bytes, shape (3, height, width)."""
    from skimage.io import imread

    return torch.from_numpy(imread(path)[..., :3].copy()).permute(2, 0, 1)


def _patches(photo: Tensor, part: int, count: int, generator: torch.Generator) -> list[Tensor]:
    height, width = photo.shape[1:]
    blocks = [
        (row, column)
        for row in range(height // _BLOCK)
        for column in range(width // _BLOCK)
        if _PART[(7 * row + 3 * column) % 5] == part
    ]
    patches: list[Tensor] = []
    seen: set[tuple[int, int]] = set()
    for _ in range(_MAX_DRAWS * count):
        row, column = blocks[int(torch.randint(len(blocks), (), generator=generator))]
        down, right = torch.randint(_BLOCK - _SIZE + 1, (2,), generator=generator).tolist()
        top, left = row * _BLOCK + down, column * _BLOCK + right
        patch = photo[:, top : top + _SIZE, left : left + _SIZE]
        if (top, left) not in seen and int(patch.max()) - int(patch.min()) >= _LEAST_CONTRAST:
            patches.append(patch)
        seen.add((top, left))
        if len(patches) == count:
            return patches
    raise UsageError("a photograph has too few patches with anything in them: the installed package has changed it")
