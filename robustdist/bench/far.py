"""Freeze and reconfigure: after some steps only the feed-forward nodes that changed most go on learning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from robustdist._lightning import Callback, LightningModule, Trainer
from robustdist.errors import UsageError

__all__ = ["FAR"]


class FAR(Callback):
    r"""Trains everything, then freezes in every feed-forward block of a BERT the nodes that changed least.

    Node j is row j of the first weight, its bias and column j of the second weight. Priming is the first part of all
    steps; from its end on only the nodes with the largest

    .. math:: \| (W_1, b_1, W_2)_j - (W_1, b_1, W_2)^0_j \|_2

    learn, beside all that is no node: embeddings, attention, norms, head and the second bias. Both layers are split
    into a learning and a frozen part, so no gradients of frozen nodes are computed, and an optimiser neither steps nor
    decays them. It goes on with the moments of the others. When fit ends the layers are whole again.

    Args:
        share: Share of nodes that go on learning, 0.1 for FAR10.
        priming: Share of all steps before that.

    Raises:
        UsageError: When training starts, if the module has no block of a BERT, named intermediate and output.

    References:
        Vucetic et al., "Efficient Fine-Tuning of BERT Models on the Edge": its text was not at hand, the measure of
        change is ours.
    """

    def __init__(self, share: float = 0.1, priming: float = 0.1) -> None:
        self.share, self.priming = share, priming
        self._before: dict[str, Tensor] = {}
        self._splits: list[_Split] = []
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the nodes."""
        self._before = {name: _nodes(*layers) for name, layers in _blocks(pl_module).items()}
        if not self._before:
            raise UsageError("model has no blocks named intermediate and output, which method far splits: use a BERT")
        self._steps = max(1, round(self.priming * float(trainer.estimated_stepping_batches)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Choose and split once priming is over."""
        if self._splits or trainer.global_step < self._steps:
            return
        for name, (first, second) in _blocks(pl_module).items():
            change = torch.linalg.vector_norm(_nodes(first, second) - self._before[name], dim=1)
            learning = change.topk(max(1, round(self.share * len(change)))).indices.sort().values
            self._splits.append(_Split(pl_module.get_submodule(name), learning, trainer.optimizers))
        self._before = {}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the layers whole again."""
        for split in self._splits:
            split.undo()
        self._splits = []


class _Split:
    """A block whose two layers are split in place, and the optimisers with them."""

    @torch.no_grad()
    def __init__(self, block: Any, learning: Tensor, optimizers: list[Optimizer]) -> None:
        self._block = block
        first, second = _layers(block)
        self._whole = first, second
        self._learning = learning
        self._frozen = torch.ones(first.out_features, dtype=torch.bool).index_fill(0, learning, False).nonzero()[:, 0]
        self.first = _First(first, learning, self._frozen)
        self.second = _Second(second, learning, self._frozen)
        self._block.intermediate.dense, self._block.output.dense = self.first, self.second
        _follow(optimizers, first.weight, self.first.weight, 0, learning)
        _follow(optimizers, first.bias, self.first.bias, 0, learning)
        _follow(optimizers, second.weight, self.second.weight, 1, learning)

    @torch.no_grad()
    def undo(self) -> None:
        """Write the nodes back where they were; frozen ones have not changed."""
        first, second = self._whole
        first.weight[self._learning] = self.first.weight
        first.bias[self._learning] = self.first.bias
        second.weight[:, self._learning] = self.second.weight
        self._block.intermediate.dense, self._block.output.dense = first, second


class _First(nn.Module):
    """From the stream to the nodes: learning ones first. Their order does not matter to what lies between."""

    def __init__(self, layer: nn.Linear, learning: Tensor, frozen: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight[learning]), nn.Parameter(layer.bias[learning])
        self.frozen_weight, self.frozen_bias = _constant(layer.weight[frozen]), _constant(layer.bias[frozen])

    def forward(self, x: Tensor) -> Tensor:
        """Return the nodes' inputs."""
        frozen = F.linear(x, self.frozen_weight, self.frozen_bias)
        return torch.cat((F.linear(x, self.weight, self.bias), frozen), dim=-1)


class _Second(nn.Module):
    """From the nodes back to the stream."""

    def __init__(self, layer: nn.Linear, learning: Tensor, frozen: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight[:, learning]), layer.bias
        self.frozen_weight = _constant(layer.weight[:, frozen])

    def forward(self, nodes: Tensor) -> Tensor:
        """Add up what the nodes say."""
        learning, frozen = torch.split(nodes, [self.weight.shape[1], self.frozen_weight.shape[1]], dim=-1)
        return F.linear(learning, self.weight, self.bias) + F.linear(frozen, self.frozen_weight)


def _constant(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _layers(block: Any) -> tuple[nn.Linear, nn.Linear]:
    return block.intermediate.dense, block.output.dense


def _blocks(module: nn.Module) -> dict[str, tuple[nn.Linear, nn.Linear]]:
    names = [name.removesuffix(".intermediate") for name, _ in module.named_modules() if name.endswith(".intermediate")]
    return {name: _layers(module.get_submodule(name)) for name in names}


@torch.no_grad()
def _nodes(first: nn.Linear, second: nn.Linear) -> Tensor:
    """Return all numbers of every node, shape (nodes, in + 1 + out)."""
    return torch.cat((first.weight, first.bias[:, None], second.weight.T), dim=1)


def _follow(optimizers: list[Optimizer], old: Tensor, new: nn.Parameter, dim: int, kept: Tensor) -> None:
    """Put ``new``, which is ``old`` at the places ``kept``, where ``old`` was, with its part of the moments."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[new] = {
                key: value.index_select(dim, kept) if isinstance(value, Tensor) and value.shape == old.shape else value
                for key, value in state.items()
            }
