"""Fixtures of the integration tests."""

from __future__ import annotations

import functools

import pytest
import torch

from robustdist.core.testing import toy_images

from .support import run


@pytest.fixture
def launch(tmp_path):
    """Return :func:`support.run` with a folder of this test."""
    return functools.partial(run, tmp_path)


@pytest.fixture
def images():
    """Return a function of the number of samples that gives images of whole pixels (n/256) and labels."""

    def make(num_samples: int, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = toy_images(num_samples, **options)
        return (x * 256).round() / 256, y

    return make
