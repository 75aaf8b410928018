"""A low-rank pair beside a frozen linear layer, merged into its weight on the way out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LowRankPair", "add_pair", "load_unmerged", "merge_pairs", "pair_of", "paired_layers", "unmerged"]

_CHILD = "learner"


class LowRankPair(nn.Module):
    r"""Two bias-free matrices beside a linear layer, without an activation between them.

    .. math:: y = x W + b + s \, x P_1 P_2, \qquad W' = W + s P_1 P_2

    Args:
        in_features: Width of ``x``.
        out_features: Width of ``y``.
        rank: Columns of :math:`P_1` and rows of :math:`P_2`.
        scale: The factor :math:`s`; 1 for learners.
        seed: Seed of :math:`P_1`, which is uniform in :math:`\pm 1 / \sqrt{\mathrm{in}}`; :math:`P_2` is zero.

    Attributes:
        down: :math:`P_1`, shape (in_features, rank).
        up: :math:`P_2`, shape (rank, out_features).
    """

    def __init__(self, in_features: int, out_features: int, rank: int, *, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        generator = torch.Generator().manual_seed(seed)
        # on the CPU whatever the default device is, so that the draws are the same everywhere
        drawn = torch.empty(in_features, rank, device="cpu").uniform_(-bound, bound, generator=generator)
        self.down = nn.Parameter(drawn)
        self.up = nn.Parameter(torch.zeros(rank, out_features, device="cpu"))
        self.scale = scale
        self.handles: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape (..., in_features) to what is added to the layer's output, (..., out_features)."""
        added: Tensor = (x @ self.down) @ self.up
        return added if self.scale == 1.0 else added * self.scale

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return what the pair adds to the weight of an ``nn.Linear``, shape (out_features, in_features)."""
        return self.scale * (self.down @ self.up).T


def add_pair(layer: nn.Linear, pair: LowRankPair) -> None:
    """Put ``pair`` beside ``layer``: it gets the layer's device and type, and its parameters are the layer's.

    The keys of ``state_dict`` stay those of the plain layer and the weight in it is the merged one. Loading a state
    dict sets :math:`P_2` to zero: the loaded weight is taken for a whole one.
    """
    layer.add_module(_CHILD, pair.to(layer.weight.device, layer.weight.dtype))
    hooked: Any = layer  # torch leaves two of these methods without types
    # plain functions that look for the pair in the layer they are called for: copies of the layer use their own
    pair.handles = [
        hooked.register_forward_hook(_add_output),
        hooked.register_state_dict_post_hook(_hide_in_state_dict),
        hooked.register_load_state_dict_pre_hook(_restart_on_load),
    ]


def paired_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers inside ``module`` that have a pair, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and isinstance(getattr(layer, _CHILD, None), LowRankPair)
    }


def merge_pairs(module: nn.Module) -> None:
    """Add every pair inside ``module`` to the weight of its layer and remove it; nothing of it stays behind."""
    for layer in paired_layers(module).values():
        pair = pair_of(layer)
        # a new tensor: whoever holds the old one, a state that is being saved for example, keeps its values
        layer.weight.data = layer.weight.data + pair.delta()
        for handle in pair.handles:
            handle.remove()
        delattr(layer, _CHILD)


def unmerged(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return weight, ``down`` and ``up`` of every layer with a pair: what a merged state dict cannot tell."""
    return {
        name: {
            "weight": layer.weight.detach(),
            "down": pair_of(layer).down.detach(),
            "up": pair_of(layer).up.detach(),
        }
        for name, layer in paired_layers(module).items()
    }


@torch.no_grad()
def load_unmerged(module: nn.Module, state: dict[str, dict[str, Tensor]]) -> None:
    """Write back what :func:`unmerged` returned; ``module`` has pairs of the same rank beside the same layers."""
    for name, layer in paired_layers(module).items():
        pair = pair_of(layer)
        layer.weight.copy_(state[name]["weight"])
        pair.down.copy_(state[name]["down"])
        pair.up.copy_(state[name]["up"])


def pair_of(layer: nn.Module) -> LowRankPair:
    """Return the pair beside ``layer``, which has one."""
    pair = getattr(layer, _CHILD)
    assert isinstance(pair, LowRankPair)
    return pair


def _add_output(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = pair_of(layer)(args[0])
    return output + added


def _hide_in_state_dict(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in ("down", "up"):
        state.pop(f"{prefix}{_CHILD}.{name}", None)
    weight = state[f"{prefix}weight"]
    state[f"{prefix}weight"] = weight + pair_of(layer).delta()


def _restart_on_load(layer: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    pair = pair_of(layer)
    state[f"{prefix}{_CHILD}.down"] = pair.down.detach()
    state[f"{prefix}{_CHILD}.up"] = torch.zeros_like(pair.up)
