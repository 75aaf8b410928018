from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.core.testing import TinyNet, toy_images


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Tensor, Tensor]:
    """A half-trained net in double precision: it gets some images wrong, and no attack decides on a rounding."""
    torch.manual_seed(1)
    net = TinyNet(batch_norm=True).double()
    x, y = toy_images(48, seed=1)
    x = x.double()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(net(x[:32]), y[:32]).backward()
        optimizer.step()
    net.zero_grad(set_to_none=True)
    return net.eval(), x, y
