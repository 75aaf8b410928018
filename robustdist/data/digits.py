"""Handwritten digits of scikit-learn, 8x8: small enough for tests."""

from __future__ import annotations

import torch

from robustdist.data.base import ImageDataModule, Parts, as_dataset, stratified_split
from robustdist.errors import UsageError

__all__ = ["DigitsDataModule"]

_SIZES = (1397, 200, 200)


class DigitsDataModule(ImageDataModule):
    """The 1797 digits that come with scikit-learn: 10 classes, 1x8x8, stratified into 1397/200/200.

    Needs scikit-learn: ``pip install 'robustdist[data]'``.

    Args:
        batch_size: Images per batch and process.
        num_workers: Worker processes per loader; 0 is fastest for data that lies in memory.
        seed: Seed of the split.
    """

    num_classes = 10
    input_shape = (1, 8, 8)

    def load(self) -> Parts:
        """Read the digits and split them.

        Raises:
            UsageError: If scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError("DigitsDataModule needs scikit-learn: pip install 'robustdist[data]'") from error
        pixels, labels = load_digits(return_X_y=True)
        x, y = torch.as_tensor(pixels).view(-1, *self.input_shape), torch.as_tensor(labels)
        return Parts(*(as_dataset(x[rows], y[rows], white=16) for rows in stratified_split(y, _SIZES, seed=self.seed)))
