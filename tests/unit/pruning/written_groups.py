"""A small convolutional net whose groups are written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robustdist.pruning.groups import Member, UnitGroup

HEADS, HEAD_DIM, WIDTH = 4, 3, 12


class ConvNet(nn.Module):
    """conv 6 - bn - relu - grouped conv 8 (2 groups) - relu - flatten - linear 5 - relu - linear 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, groups=2)
        self.hidden = nn.Linear(8 * 16, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.relu(self.conv2(x)).flatten(1)
        return self.head(torch.relu(self.hidden(x)))


def conv_net(seed: int = 0) -> ConvNet:
    """A net whose scales, biases and statistics are not the initial ones."""
    return _shaken(ConvNet(), seed)


def conv_groups() -> list[UnitGroup]:
    """conv1: 3 units and conv2: 4, of two channels each, because grouped layers lose one from each group; hidden: 5."""
    pairs = torch.arange(6) % 3
    rows = [Member(f"conv1.{name}", 0, pairs, "producer") for name in ("weight", "bias")]
    scales = [Member(f"norm.{name}", 0, pairs, "norm") for name in ("weight", "bias", "running_mean", "running_var")]
    conv1 = UnitGroup("conv1", "channels", 3, (*rows, *scales, Member("conv2.weight", 1, torch.arange(3), "consumer")))
    conv2 = UnitGroup(
        "conv2",
        "channels",
        4,
        (
            *(Member(f"conv2.{name}", 0, torch.arange(8) % 4, "producer") for name in ("weight", "bias")),
            Member("hidden.weight", 1, (torch.arange(8) % 4).repeat_interleave(16), "consumer"),
        ),
    )
    hidden = UnitGroup(
        "hidden",
        "ffn",
        5,
        (
            *(Member(f"hidden.{name}", 0, torch.arange(5), "producer") for name in ("weight", "bias")),
            Member("head.weight", 1, torch.arange(5), "consumer"),
        ),
    )
    return [conv1, conv2, hidden]


class Attention(nn.Module):
    """Four heads of width 3 over 12 dimensions, then a linear layer over the mean of the tokens."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.block = _Heads(heads)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.block(x)).mean(1))


class _Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * HEAD_DIM) for _ in range(3))
        self.out = nn.Linear(heads * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def attention_net(seed: int = 0, heads: int = HEADS) -> Attention:
    return _shaken(Attention(heads), seed)


def attention_groups() -> list[UnitGroup]:
    units = torch.arange(HEADS).repeat_interleave(HEAD_DIM)
    rows = [Member(f"block.{layer}.{name}", 0, units, "producer") for layer in "qkv" for name in ("weight", "bias")]
    return [UnitGroup("block", "heads", HEADS, (*rows, Member("block.out.weight", 1, units, "consumer")))]


def _shaken(net: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.5 + noise.abs() if "var" in name else noise / max(tensor[0].numel(), 1) ** 0.5)
    return net
