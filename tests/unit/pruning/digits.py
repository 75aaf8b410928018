"""A small convolutional net on the digits that come with scikit-learn, with groups written by hand."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from robustdist.pruning.groups import Member, UnitGroup


def digits() -> tuple[Tensor, Tensor]:
    """Images of shape (1797, 1, 8, 8) in [0, 1], shuffled, and labels."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


def digits_net(widths: tuple[int, int, int] = (16, 32, 32)) -> nn.Sequential:
    torch.manual_seed(0)
    a, b, c = widths
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.BatchNorm2d(b), nn.ReLU()),
        *(nn.Conv2d(b, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)),
    )


def digits_groups(net: nn.Sequential) -> list[UnitGroup]:
    groups = []
    for layer, reader in ((0, 3), (3, 6), (6, 11)):
        units = torch.arange(net[layer].out_channels)
        rows = [Member(f"{layer}.{name}", 0, units, "producer") for name in ("weight", "bias")]
        names = ("weight", "bias", "running_mean", "running_var")
        norms = [Member(f"{layer + 1}.{name}", 0, units, "norm") for name in names]
        consumer = Member(f"{reader}.weight", 1, units, "consumer")
        groups.append(UnitGroup(f"{layer}", "channels", len(units), (*rows, *norms, consumer)))
    return groups
