"""Groups of convolutions and linear layers, out of torch-pruning's dependency graph.

torch-pruning follows autograd's graph of one forward pass and says which channels depend on each other, through
additions, concatenations and reshapes. Only that is used of it: it touches a copy, and cuts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.errors import UsageError
from robustdist.pruning.example import tensors_in
from robustdist.pruning.groups import Kind, Member, Role, UnitGroup
from robustdist.pruning.layers import CHANNEL_NORMS, CONVOLUTIONS, TRANSPOSED, is_depthwise
from robustdist.pruning.spare import call, spare_copy, undisturbed
from robustdist.pruning.untraceable import covers, cut_off, untraceable_parts

__all__ = ["traced_groups"]

#: Layers whose output channels start a group.
_ROOTS = (*CONVOLUTIONS, nn.Linear)
#: Statistics over channels: removing some changes what the others become.
_OVER_CHANNELS = (nn.LayerNorm, nn.RMSNorm)


def traced_groups(
    module: nn.Module,
    example: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    ignore: Sequence[str] = (),
    refused: dict[str, str] | None = None,
) -> list[UnitGroup]:
    """Find the channels of ``module`` that are coupled. The module is not touched.

    Groups that reach the output, or a layer that cannot lose channels (LSTM, GroupNorm), are left out. Those through a
    LayerNorm have kind "hidden". Parts that cannot be traced are left out if ``ignore`` says so; nothing in them goes,
    nor what they read.

    Args:
        module: Any module with convolutions or linear layers, frozen ones included.
        example: An input batch; small is enough.
        forward: Maps (module, example) to the output; default ``module(example)``.
        ignore: Patterns of paths of parts that need not be traced.
        refused: Path -> reason, filled with the parts that were not, and layers whose channels cannot be followed.

    Raises:
        UsageError: If torch-pruning is missing, or the model cannot be traced.
    """
    run, notes = forward or call, {} if refused is None else refused
    with undisturbed():
        spare = spare_copy(module)
        graph = _dependency_graph(spare, lambda: run(spare, example), ignore, notes)
    names = {id(layer): path for path, layer in spare.named_modules()}
    names |= {id(parameter): path for path, parameter in spare.named_parameters()}
    groups, seen = [], set[str]()
    for path, layer in spare.named_modules():
        if not isinstance(layer, _ROOTS) or path in seen or layer not in graph.module2node:
            continue
        try:
            group = _Walk(graph, names, path, layer)
        except Exception as error:  # torch-pruning lost its way, as it does in some reshapes
            notes[path] = f"its channels cannot be followed ({type(error).__name__}: {error})"
            continue
        seen |= group.producers
        built = group.build()
        if built is not None:
            groups.append(built)
    return groups


def _dependency_graph(spare: nn.Module, run: Callable[[], Any], ignore: Sequence[str], refused: dict[str, str]) -> Any:
    try:
        return _built(spare, run)
    except UsageError:
        raise
    except Exception as error:  # whatever torch-pruning, or the model on this example, cannot do
        paths, runs = untraceable_parts(spare, run, _built, type(error))
        reason = f"{type(error).__name__}: {error}"
        if runs and paths and all(covers(ignore, path) for path in paths):
            refused.update(dict.fromkeys(paths, f"it cannot be traced ({reason}), and ignore leaves it out"))
            with cut_off(spare, paths) as given:
                return _built(spare, lambda: [run(), given])
        where = f"{type(spare).__name__} cannot be traced{' in ' if paths else ''}{', '.join(paths)} ({reason})"
        if runs and paths:
            raise UsageError(f"{where}: ignore={paths} leaves these parts, and what they read, whole") from error
        raise UsageError(
            f"{where}: give example and forward that run in eval mode, or put the part that cannot be traced outside "
            "of the pruned module"
        ) from error


def _built(part: nn.Module, run: Callable[[], Any]) -> Any:
    """Return torch-pruning's graph of ``part``, which ``run`` calls."""
    try:
        import torch_pruning
    except ModuleNotFoundError as error:
        raise UsageError(
            "finding the channels of a convolutional network needs torch-pruning: pip install 'robustdist[prune]'"
        ) from error

    def with_graph(net: nn.Module, x: Any) -> list[Tensor]:
        return [tensor for tensor in tensors_in(run()) if tensor.requires_grad]

    return torch_pruning.DependencyGraph().build_dependency(part, None, forward_fn=with_graph, verbose=False)


class _Walk:
    """One group of the dependency graph, translated member by member."""

    def __init__(self, graph: Any, names: dict[int, str], path: str, layer: Any) -> None:
        self.path = path
        self.size: int = layer.weight.shape[1 if isinstance(layer, TRANSPOSED) else 0]
        if isinstance(layer, TRANSPOSED):
            self.size *= layer.groups
        pruner = graph.get_pruner_of_module(layer)
        items = graph.get_pruning_group(layer, pruner.prune_out_channels, idxs=list(range(self.size))).items
        self.parameter_dims = {id(entry.parameters): entry.pruning_dim for entry in graph.unwrapped_parameters}
        self.places: dict[tuple[str, int], tuple[Tensor, Role]] = {}
        self.producers: set[str] = {path}
        self.kind: Kind = "channels"
        self.period = self.size
        self.refused = False
        for item in items:
            target = item.dep.target.module
            if id(target) in names:
                self._note(names[id(target)], target, bool(graph.is_out_channel_pruning_fn(item.dep.handler)), item)

    def _note(self, path: str, layer: Any, makes: bool, item: Any) -> None:
        index, roots = torch.tensor(item.idxs), torch.tensor(item.root_idxs)
        if isinstance(layer, nn.Parameter):
            dim = self.parameter_dims.get(id(layer))
            if dim is None:
                self.refused = True
            else:
                self._put(path, dim, layer.shape[dim], index, roots, "norm")
        elif isinstance(layer, _ROOTS) and "weight" not in dict(layer.named_parameters(recurse=False)):
            self.refused = True  # computed from other tensors, as by weight norm: its rows cannot go
        elif isinstance(layer, CONVOLUTIONS):
            self._convolution(path, layer, makes, index, roots)
        elif isinstance(layer, nn.Linear):
            if makes:
                self.producers.add(path)
                self._rows(path, layer, index, roots)
            else:
                self._put(f"{path}.weight", 1, layer.in_features, index, roots, "consumer")
        elif isinstance(layer, (*CHANNEL_NORMS, nn.PReLU, *_OVER_CHANNELS)):
            self.kind = "hidden" if isinstance(layer, _OVER_CHANNELS) else self.kind
            self._scales(path, layer, index, roots)
        elif isinstance(layer, nn.Embedding):
            self._put(f"{path}.weight", 1, layer.embedding_dim, index, roots, "producer")
        else:
            self.refused = True

    def _convolution(self, path: str, layer: Any, makes: bool, index: Tensor, roots: Tensor) -> None:
        transposed = isinstance(layer, TRANSPOSED)
        if is_depthwise(layer):
            self.producers.add(path)
            self._rows(path, layer, index, roots, role="norm")
            return
        if layer.groups > 1:
            # a channel goes from each of the layer's groups at once: units repeat with the width of one
            width = (layer.out_channels if makes else layer.in_channels) // layer.groups
            if transposed or not torch.equal(index, roots):
                self.refused = True
                return
            self.period = math.gcd(self.period, width)
            if not makes:
                self._put(f"{path}.weight", 1, width, torch.arange(width), torch.arange(width), "consumer")
                return
        if makes:
            self.producers.add(path)
            self._rows(path, layer, index, roots, dim=1 if transposed else 0)
        else:
            self._put(f"{path}.weight", 0 if transposed else 1, layer.in_channels, index, roots, "consumer")

    def _rows(
        self, path: str, layer: Any, index: Tensor, roots: Tensor, *, dim: int = 0, role: Role = "producer"
    ) -> None:
        self._put(f"{path}.weight", dim, layer.weight.shape[dim], index, roots, role)
        if layer.bias is not None:
            self._put(f"{path}.bias", 0, len(layer.bias), index, roots, role)

    def _scales(self, path: str, layer: nn.Module, index: Tensor, roots: Tensor) -> None:
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if tensor.dim() == 1 and len(tensor) > 1:
                self._put(f"{path}.{name}", 0, len(tensor), index, roots, "norm")

    def _put(self, tensor: str, dim: int, size: int, index: Tensor, roots: Tensor, role: Role) -> None:
        units = self.places.get((tensor, dim), (torch.full((size,), -1), role))[0]
        units[index] = roots
        self.places[tensor, dim] = units, role

    def build(self) -> UnitGroup | None:
        """Return the group, or ``None`` if its channels have to stay."""
        members = tuple(
            Member(tensor, dim, torch.where(units < 0, -1, units % self.period), role)
            for (tensor, dim), (units, role) in self.places.items()
        )
        # what nobody reads is the output
        readable = any(member.role == "consumer" for member in members)
        if self.refused or not readable or self.period < 2:
            return None
        return UnitGroup(self.path, self.kind, self.period, members)
