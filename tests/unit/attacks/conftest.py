"""One small trained network with everything that makes a network hard to leave as it was."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 5
SHAPE = (3, 8, 8)


class SmallNet(nn.Module):
    """Two convolutions with batch norm, dropout, and a head; counts its forwards and raises at ``fail_at``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 4 * 4, NUM_CLASSES)
        self.num_forwards = 0
        self.fail_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == self.fail_at:
            raise ArithmeticError("the model fails on purpose")
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x).flatten(1))


class Task(NamedTuple):
    net: SmallNet
    x: Tensor
    y: Tensor


def draw(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy copies of one pattern per class; a tenth of the pixels is exactly black, a tenth exactly white."""
    patterns = torch.rand(NUM_CLASSES, *SHAPE, generator=torch.Generator().manual_seed(7))
    y = torch.arange(num) % NUM_CLASSES
    x = 0.2 + 0.6 * patterns[y] + 0.1 * torch.randn(num, *SHAPE, generator=generator)
    position = torch.rand(x.shape, generator=generator)
    return x.clamp(0, 1).masked_fill(position < 0.1, 0.0).masked_fill(position > 0.9, 1.0), y


@pytest.fixture(scope="session")
def trained() -> Task:
    """Train once per session."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(1)
        net = SmallNet()
        optimizer = torch.optim.Adam(net.parameters(), 5e-3)
        for _ in range(60):
            x, y = draw(64, generator)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        x, y = draw(10, generator)
        with torch.no_grad():
            assert bool((net.eval()(x).argmax(1) == y).all()), "the fixture must classify its samples"
    return Task(net, x, y)


@pytest.fixture
def task(trained: Task) -> Task:
    """A copy for one test: in eval mode, without gradients, 10 samples that it classifies."""
    net = copy.deepcopy(trained.net).eval()
    net.zero_grad(set_to_none=True)
    net.num_forwards = 0
    return Task(net, trained.x.clone(), trained.y.clone())
