"""Tiny transformers of several makes, with random norms and biases, and what masks and removes units of them."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robustdist.pruning.depth import skip_layers
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.hidden import norms_over_survivors
from robustdist.pruning.masks import mask_units
from robustdist.pruning.recipe import compile_recipe


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every tensor of ``module`` random values, norms and biases too; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        if parameter.dim() == 1:
            parameter.data += 1.0
    return module.eval()


class HomeMade(nn.Module):
    """Attention as people write it: one letter for what others call ``num_heads``."""

    def __init__(self, width: int = 16, heads: int = 4, head_dim: int = 6, fused: bool = False) -> None:
        super().__init__()
        self.h, self.hd = heads, head_dim
        if fused:
            self.qkv = nn.Linear(width, 3 * heads * head_dim)
        else:
            self.q, self.k, self.v = (nn.Linear(width, heads * head_dim) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.reshape(*x.shape[:2], self.h, self.hd).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(-2, -1) / self.hd**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.h * self.hd))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, width: int = 16, inner: int = 24, activation: nn.Module | None = None):
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), activation or nn.Sigmoid(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HomeMadeModel(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def masked_and_removed(
    module: nn.Module, groups: Sequence[UnitGroup], removed: dict[str, list[int]], dropped_layers: Sequence[str] = ()
) -> tuple[nn.Module, nn.Module]:
    """Return two copies of ``module``: one with units at zero, one without them."""
    masked, small = copy.deepcopy(module), copy.deepcopy(module)
    recipe = compile_recipe(module, groups, removed, dropped_layers=dropped_layers)
    mask_units(masked, groups, removed)
    norms_over_survivors(masked, recipe)
    skip_layers(masked, recipe.dropped_layers)
    recipe.apply(small)
    return masked, small


def draw(groups: Sequence[UnitGroup], share: float, seed: int = 0) -> dict[str, list[int]]:
    """Choose this share of every group at random, never all of it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        group.name: torch.randperm(group.size, generator=generator)[
            : min(group.size - 1, round(group.size * share))
        ].tolist()
        for group in groups
    }
