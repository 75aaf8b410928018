"""What the attributes of torch's own layers are, given the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["CHANNEL_NORMS", "CONVOLUTIONS", "DIRECT", "TRANSPOSED", "attributes_of_layer", "is_depthwise"]

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DIRECT = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTIONS = (*DIRECT, *TRANSPOSED)
#: Norms that treat every channel by itself.
CHANNEL_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def is_depthwise(layer: nn.Module) -> bool:
    """Return whether every output channel reads one input channel of its own."""
    return isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels > 1


def attributes_of_layer(layer: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int | tuple[int, ...]]:
    """Return the attributes that have to change so that ``layer`` goes with tensors of these shapes.

    Args:
        layer: The layer as it is, dense.
        shapes: Name of a tensor of the layer -> its shape to be.
    """
    if isinstance(layer, CONVOLUTIONS):
        return _convolution(layer, shapes["weight"])
    if isinstance(layer, nn.Linear):
        return {"in_features": shapes["weight"][1], "out_features": shapes["weight"][0]}
    if isinstance(layer, nn.Embedding):
        return {"num_embeddings": shapes["weight"][0], "embedding_dim": shapes["weight"][1]}
    if isinstance(layer, CHANNEL_NORMS):
        return {"num_features": next(iter(shapes.values()))[0]}
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": shapes["weight"]}
    if isinstance(layer, nn.GroupNorm):
        return {"num_channels": shapes["weight"][0]}
    if isinstance(layer, nn.PReLU):
        return {"num_parameters": shapes["weight"][0]}
    return {}


def _convolution(layer: Any, weight: tuple[int, ...]) -> dict[str, int | tuple[int, ...]]:
    if is_depthwise(layer):
        return {"groups": weight[0], "in_channels": weight[0], "out_channels": weight[0]}
    if isinstance(layer, TRANSPOSED):
        return {"in_channels": weight[0], "out_channels": weight[1] * layer.groups}
    return {"in_channels": weight[1] * layer.groups, "out_channels": weight[0]}
