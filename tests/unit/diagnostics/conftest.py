from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD
from robustdist.core.testing import TinyNet, toy_images

EPS = 0.2


class DigitsNet(nn.Module):
    """Two convolutions for 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(512, 64)
        self.head = nn.Linear(64, 10)

    def activation(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.body(self.activation(self.stem(x)))).flatten(1)
        return self.head(torch.relu(self.hidden(hidden)))


def trained(x: Tensor, y: Tensor, epochs: int, attack_steps: int) -> DigitsNet:
    torch.manual_seed(0)
    net = DigitsNet()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for epoch in range(epochs):
        eps = EPS * min(1.0, (epoch + 1) / (epochs // 2))
        for step, rows in enumerate(torch.randperm(len(x)).split(64)):
            batch = x[rows]
            if attack_steps:
                batch = PGD(eps=eps, steps=attack_steps)(net, batch, y[rows], step=epoch * 1000 + step)
            optimizer.zero_grad()
            F.cross_entropy(net(batch), y[rows]).backward()
            optimizer.step()
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits of scikit-learn in [0, 1]: images and labels to train on, 100 of each to judge."""
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:1500], y[1400:1500]


@pytest.fixture(scope="session")
def ordinary(digits) -> DigitsNet:
    return trained(*digits[:2], epochs=15, attack_steps=0)


@pytest.fixture(scope="session")
def robust(digits) -> DigitsNet:
    return trained(*digits[:2], epochs=20, attack_steps=5)


@pytest.fixture(scope="session")
def toy() -> tuple[nn.Module, Tensor, Tensor]:
    """A small net that is right on most of 40 toy images."""
    torch.manual_seed(0)
    net, (x, y) = TinyNet(), toy_images(40, seed=3)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(9):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval().requires_grad_(False), x, y
