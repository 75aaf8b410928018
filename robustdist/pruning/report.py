"""What pruning brought: widths, parameters, multiply-accumulates, file size and CPU time, dense and small."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from robustdist.pruning.cost import CostModel
from robustdist.pruning.example import with_rows
from robustdist.pruning.latency import cpu_times
from robustdist.pruning.layers import TRANSPOSED
from robustdist.pruning.recipe import PruningRecipe
from robustdist.pruning.spare import spare_copy, undisturbed

__all__ = ["LayerWidths", "Sizes", "compared", "dense_shell", "depths", "file_bytes", "layer_widths", "regrown"]

Forward: TypeAlias = Callable[[nn.Module, Any], Any]
_ROUNDS = 7


@dataclass(frozen=True)
class LayerWidths:
    """A layer that became narrower.

    Attributes:
        name: Path of the layer.
        outputs: Rows of its weight before and after.
        inputs: Columns before and after; ``None`` where it has none, as in norms.
    """

    name: str
    outputs: tuple[int, int]
    inputs: tuple[int, int] | None


@dataclass(frozen=True)
class Sizes:
    """Size and speed of one model.

    Attributes:
        params: Parameters.
        macs: Multiply-accumulates of one sample.
        file_bytes: Bytes of its state dict as ``torch.save`` writes it.
        cpu_ms: Batch size -> milliseconds of CPU time of a forward pass in one thread, as text keys; empty if not
            measured.
    """

    params: int
    macs: int
    file_bytes: int
    cpu_ms: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def layer_widths(recipe: PruningRecipe, module: nn.Module) -> list[LayerWidths]:
    """Return the layers of the small ``module`` that ``recipe`` made narrower, in the order of the module."""
    before = {(cut.tensor, cut.dim): (len(cut.keep), sum(cut.keep)) for cut in recipe.cuts}
    cut_tensors = {cut.tensor for cut in recipe.cuts}
    found = []
    for name, parameter in module.named_parameters():
        if name not in cut_tensors or parameter.dim() < 2:
            continue
        path, _, own = name.rpartition(".")
        sides = [before.get((name, dim), (parameter.shape[dim],) * 2) for dim in (0, 1)]
        if isinstance(module.get_submodule(path), TRANSPOSED):
            sides.reverse()
        found.append(LayerWidths(path if own == "weight" else name, sides[0], sides[1]))
    return found


def depths(recipe: PruningRecipe, module: nn.Module) -> list[dict[str, Any]]:
    """Return the lists of layers some of which were dropped: name, layers before and after, paths of those gone."""
    gone: dict[str, list[str]] = {}
    for path in recipe.dropped_layers:
        gone.setdefault(path.rpartition(".")[0], []).append(path)
    sizes = {name: len(list(module.get_submodule(name).children())) for name in gone}
    return [
        {"name": name, "before": sizes[name], "after": sizes[name] - len(paths), "gone": paths}
        for name, paths in gone.items()
    ]


def dense_shell(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with its shapes and without memory for its weights."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        hollow = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(hollow, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    return copy.deepcopy(module, memo).eval()


def regrown(shell: nn.Module, module: nn.Module, recipe: PruningRecipe) -> nn.Module:
    """Fill the dense ``shell`` with the small module's weights, repeated where units are missing.

    Layers that are missing get a constant.
    It computes nothing useful, but with ordinary numbers, as long as the dense network would take.
    """
    small = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in [*shell.named_parameters(), *shell.named_buffers()]:
        value = small[name].detach().cpu() if name in small else torch.full(tensor.shape, 0.01).to(tensor.dtype)
        for cut in recipe.cuts:
            if cut.tensor == name:
                keep = torch.tensor(cut.keep)
                index = torch.where(keep, keep.cumsum(0) - 1, torch.arange(len(keep)) % keep.sum())
                value = value.index_select(cut.dim, index)
        tensor.data = value.clone()
    return shell


class _Counter(io.BytesIO):
    """Counts what is written and keeps nothing."""

    count = 0

    def write(self, content: Any) -> int:
        self.count += len(content)
        return len(content)


def file_bytes(module: nn.Module) -> int:
    """Return how many bytes ``torch.save`` writes for the state dict of ``module``."""
    counter = _Counter()
    torch.save(module.state_dict(), counter)
    return counter.count


def compared(
    dense: nn.Module, small: nn.Module, example: Any, forward: Forward, *, seconds: float = 20.0
) -> tuple[Sizes, Sizes]:
    """Return sizes of both models, their times taken in turn.

    Args:
        dense: A model on the CPU.
        small: The pruned model, on any device; it is copied.
        example: Input of ``forward``, on the CPU.
        forward: Runs a model on an input.
        seconds: About how long the measurement of times may take; 0: none. Batch sizes of which a single pass of both
            models takes longer are left out.
    """
    models = {"dense": dense.eval(), "small": spare_copy(small).cpu()}
    times: dict[str, dict[str, float]] = {name: {} for name in models}
    with undisturbed(), torch.no_grad():
        costs = {
            name: CostModel(model, [], partial(forward, model, with_rows(example, 1))).dense
            for name, model in models.items()
        }
        for rows in (1, 32) if seconds else ():
            batch = with_rows(example, rows)
            calls = {name: partial(forward, model, batch) for name, model in models.items()}
            started = time.perf_counter()
            for call in calls.values():
                call()
            rounds = min(_ROUNDS, int(seconds / 2 / max(time.perf_counter() - started, 1e-6)))
            if rounds:
                for name, value in cpu_times(calls, rounds=rounds, warmup=0).items():
                    times[name][str(rows)] = value
    results = [
        Sizes(costs[name].params, costs[name].macs, file_bytes(model), times[name]) for name, model in models.items()
    ]
    return results[0], results[1]
