"""Networks and a batch in float64, for formulas that are held against a derivation of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.objectives.papers_support import ConvNet, network


@pytest.fixture(params=["linear", "relu", "conv"])
def net(request) -> nn.Module:
    return {"linear": lambda: network(6, 4), "relu": lambda: network(6, 9, 4), "conv": lambda: ConvNet().double()}[
        request.param
    ]()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    x = torch.rand(5, 1, 2, 3, dtype=torch.float64)
    x[0, 0, 0], x[1, 0, 1] = 0.0, 1.0  # the box is felt
    return x, torch.tensor([0, 3, 1, 1, 2])
