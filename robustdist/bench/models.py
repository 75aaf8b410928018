"""The networks that the benchmarks train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PreActResNet", "ResNet", "ResidualNet", "small_conv_net"]

_BLOCKS_PER_STAGE = 2
_STRIDES = (1, 2, 2, 2)


class _PreActBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = None if same_shape else nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        return out + shortcut


class PreActResNet(nn.Module):
    """Pre-activation ResNet-18 for 3x32x32 images, narrow enough for one CPU thread.

    Four stages of two blocks with ``width``, ``2 * width``, ``4 * width`` and ``8 * width`` channels; 35 million
    multiply-adds per image at width 16.

    Args:
        width: Channels of the first stage.
        num_classes: Length of the logits.

    References:
        He et al., "Identity Mappings in Deep Residual Networks".

    Example:
        >>> import torch
        >>> PreActResNet(width=4)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        channels = width
        for stage, stride in enumerate(_STRIDES):
            out_channels = width * 2**stage
            for block in range(_BLOCKS_PER_STAGE):
                blocks.append(_PreActBlock(channels, out_channels, stride if block == 0 else 1))
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        features = F.relu(self.norm(self.blocks(self.stem(x))))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions, each before batch norm, around a shortcut; ReLU after the sum."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Sequential()
        if not same_shape:
            self.shortcut.append(nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Post-activation ResNet-18 of the same size: every batch norm follows a convolution.

    Args:
        width: Channels of the first stage.
        num_classes: Length of the logits.

    References:
        He et al., "Deep Residual Learning for Image Recognition".

    Example:
        >>> import torch
        >>> ResNet(width=4)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        channels = width
        for stage, stride in enumerate(_STRIDES):
            out_channels = width * 2**stage
            for block in range(_BLOCKS_PER_STAGE):
                blocks.append(_Block(channels, out_channels, stride if block == 0 else 1))
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class ResidualNet(nn.Module):
    """A stem and post-activation blocks of given widths, each after the first of half the size; for small images.

    Args:
        widths: Channels of the stem, and of one block each.
        in_channels: Channels of the images.
        num_classes: Length of the logits.

    Example:
        >>> import torch
        >>> ResidualNet((8, 8, 16))(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, widths: Sequence[int], in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        stem = widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem), nn.ReLU()
        )
        pairs = pairwise(widths)
        self.blocks = nn.Sequential(*(_Block(a, b, 1 if place == 0 else 2) for place, (a, b) in enumerate(pairs)))
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def small_conv_net(image_size: int = 28, num_classes: int = 10) -> nn.Sequential:
    """Return two strided convolutions and two linear layers for grey images; 166,406 parameters at 28x28.

    Args:
        image_size: Height and width of the images, a multiple of 4.
        num_classes: Length of the logits.

    Example:
        >>> sum(parameter.numel() for parameter in small_conv_net().parameters())
        166406
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (image_size // 4) ** 2, 100),
        nn.ReLU(),
        nn.Linear(100, num_classes),
    )
