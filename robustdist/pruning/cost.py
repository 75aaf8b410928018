"""Parameters and multiply-accumulates of what would remain, before anything is removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from robustdist.core.guard import module_mode
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.importance import named_tensors
from robustdist.pruning.layers import DIRECT, TRANSPOSED
from robustdist.pruning.projections import is_below

__all__ = ["Cost", "CostModel", "keep_values"]


@dataclass(frozen=True)
class Cost:
    """Size of a model.

    Attributes:
        params: Parameters, shared ones once.
        macs: Multiply-accumulates of one forward pass on the recorded input, in layers and in attention products.
    """

    params: int
    macs: int


def keep_values(groups: Iterable[UnitGroup], removed: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return 1 for units that stay and 0 for those that go, float64 of shape (size,) per group."""
    values = {}
    for group in groups:
        values[group.name] = torch.ones(group.size, dtype=torch.float64)
        values[group.name][list(removed.get(group.name, ()))] = 0
    return values


class CostModel:
    r"""Parameters and multiply-accumulates as a function of the units that stay.

    A tensor with dimensions d keeps :math:`\prod_d \big(n_d - \sum_k c_{dk} (1 - z_k)\big)` entries, where unit k takes
    :math:`c_{dk}` indices of d along; a convolution or linear layer needs one multiply-accumulate per weight and output
    position, whose number does not change. The rest of what torch counts, attention products, falls with the heads, and
    all that is in a block with the block.
    With probabilities in place of 0 and 1 it is the expected cost of independent units, and has a gradient.

    Args:
        module: The dense module; its state is not changed.
        groups: Groups of units of ``module``.
        forward: Runs ``module`` once on the input that the multiply-accumulates are counted for, for example one
            sample; called once, without gradients and with ``module`` in eval mode. ``None``: only parameters.

    Attributes:
        dense: Cost of the module as it is.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[UnitGroup], forward: Callable[[], object] | None = None
    ) -> None:
        recorder = _Recorder(module)
        if forward is not None:
            with recorder.recording():
                forward()
        self._starts: dict[str, tuple[int, int]] = {}
        for group in groups:
            self._starts[group.name] = sum(size for _, size in self._starts.values()), group.size
        self._shares = _Shares()
        places = self._dimensions(groups, named_tensors(module))
        blocks = {
            path: self._shares.add(1, {group.name: (self._starts[group.name][0] + torch.tensor([unit]), torch.ones(1))})
            for group in groups
            for unit, path in enumerate(group.layers)
        }
        sizes: dict[tuple[int, ...], list[float]] = {}
        for name, tensor in module.named_parameters():
            dims = [self._shares.add(size, places.get((id(tensor), dim), {})) for dim, size in enumerate(tensor.shape)]
            total = sizes.setdefault((*dims, *_inside(blocks, name)), [0.0, 0.0])
            total[0] += tensor.numel()
            total[1] += tensor.numel() * recorder.positions.get(id(tensor), 0)
        products = _attention_products(groups, recorder.rest)
        rest: dict[tuple[int, ...], float] = {(share,): recorder.rest.get(path, 0.0) for path, share in blocks.items()}
        rest[()] = recorder.unassigned - sum(rest.values())
        for group in groups:
            if group.name in products:
                start, units = self._starts[group.name][0], torch.arange(group.size)
                share = self._shares.add(group.size, {group.name: (start + units, torch.ones(group.size))})
                around = _inside(blocks, group.members[0].tensor)
                sizes.setdefault((share, *around), [0.0, 0.0])[1] += products[group.name]
                rest[around] -= products[group.name]
        for key, count in rest.items():
            sizes.setdefault(key, [0.0, 0.0])[1] += count
        width = max(map(len, sizes))
        self._factors = torch.tensor([[*dims, *[0] * (width - len(dims))] for dims in sizes])
        self._sizes = torch.tensor(list(sizes.values()), dtype=torch.float64)
        self.dense = self.of({})

    def _dimensions(
        self, groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]
    ) -> dict[tuple[int, int], dict[str, tuple[Tensor, Tensor]]]:
        """Dimensions that lose indices: by group, the numbers of the units and how many indices each takes along."""
        places: dict[tuple[int, int], dict[str, tuple[Tensor, Tensor]]] = {}
        for group in groups:
            for member in group.members:
                counts = torch.bincount(member.units[member.units >= 0], minlength=group.size)
                units = counts.nonzero().flatten()
                entry = self._starts[group.name][0] + units, counts[units].double()
                places.setdefault((id(tensors[member.tensor]), member.dim), {})[group.name] = entry
        return places

    def of(self, removed: Mapping[str, Sequence[int]]) -> Cost:
        """Return the cost once the units in ``removed``, by name of the group, are gone."""
        values = {name: torch.ones(self._starts[name][1], dtype=torch.float64) for name in removed}
        for name, units in removed.items():
            values[name][list(units)] = 0
        params, macs = self.expected(values)
        return Cost(round(float(params)), round(float(macs)))

    def expected(self, keep: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return parameters and multiply-accumulates for shares in [0, 1] of every unit, differentiable.

        Args:
            keep: Name of a group -> shape (size,); groups that are missing stay whole.
        """
        parts = [
            keep[name].double().cpu() if name in keep else torch.ones(size, dtype=torch.float64)
            for name, (_, size) in self._starts.items()
        ]
        shares = self._shares.left(torch.cat(parts) if parts else torch.ones(0, dtype=torch.float64))
        params, macs = shares[self._factors].prod(1) @ self._sizes
        return params, macs


class _Shares:
    """What share of its indices each dimension keeps; dimensions that lose the same are one. Number 0 loses nothing."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {(): 0}
        self._entries: list[tuple[Tensor, Tensor]] = []

    def add(self, size: int, losses: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        """Return the number of a dimension of ``size`` that loses, with some units, some numbers of indices."""
        key = tuple((size, name, *units.tolist(), *counts.tolist()) for name, (units, counts) in losses.items())
        if key not in self._known:
            self._known[key] = len(self._known)
            self._entries.append(
                (
                    torch.cat([units for units, _ in losses.values()]),
                    torch.cat([counts.double() for _, counts in losses.values()]) / size,
                )
            )
        return self._known[key]

    def left(self, keep: Tensor) -> Tensor:
        """Return the shares, given those of all units in a row."""
        full = torch.ones(len(self._known), dtype=torch.float64)
        if not self._entries:
            return full
        units = torch.cat([units for units, _ in self._entries])
        weights = torch.cat([weights for _, weights in self._entries])
        numbers = torch.arange(1, len(self._known)).repeat_interleave(
            torch.tensor([len(units) for units, _ in self._entries])
        )
        return full.index_add(0, numbers, weights * (keep[units] - 1))


def _inside(blocks: Mapping[str, int], name: str) -> tuple[int, ...]:
    """Return the share of the block that the tensor ``name`` is in, if it is in one that can go."""
    return tuple(share for path, share in blocks.items() if is_below(name, path))


def _attention_products(groups: Sequence[UnitGroup], rest: Mapping[str, float]) -> dict[str, float]:
    """Multiply-accumulates of attention products that fall with the heads of each group."""
    paths = {
        group.name: _common_path(member.tensor for member in group.members) for group in groups if group.kind == "heads"
    }
    sharing = Counter(paths.values())
    return {name: rest.get(path, 0.0) / sharing[path] for name, path in paths.items()}


def _common_path(names: Iterable[str]) -> str:
    """Longest module path that all tensors are under."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


class _Recorder:
    """Positions of layers, and matrix products outside of layers, of one forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        #: id of a weight -> positions it is applied to, summed over calls.
        self.positions: dict[int, float] = {}
        #: Path of a module -> multiply-accumulates inside of it that belong to no layer.
        self.rest: dict[str, float] = {}
        #: The same of the whole pass.
        self.unassigned = 0.0
        self._layers = 0.0
        self._open: list[tuple[float, float]] = []
        self._counter = FlopCounterMode(display=False, custom_mapping=_cpu_attention())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count while a forward pass runs."""
        with ExitStack() as stack:
            for path, part in self.module.named_modules():
                stack.enter_context(_removing(part.register_forward_pre_hook(self._enter)))
                stack.enter_context(_removing(part.register_forward_hook(self._leaver(path), with_kwargs=True)))
            stack.enter_context(module_mode(self.module, "eval"))
            stack.enter_context(_unfused_attention())
            with torch.no_grad(), self._counter:
                yield
        self.unassigned = self._counter.get_total_flops() / 2 - self._layers

    def _enter(self, part: nn.Module, inputs: Any) -> None:
        self._open.append((self._counter.get_total_flops() / 2, self._layers))

    def _leaver(self, path: str) -> Callable[..., None]:
        def leave(part: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for weight, positions in _uses(part, inputs, kwargs, output):
                if not isinstance(weight, nn.Parameter):
                    continue  # computed from others, as by weight norm: nothing of it can go
                self.positions[id(weight)] = self.positions.get(id(weight), 0) + positions
                self._layers += positions * weight.numel()
            flops, layers = self._open.pop()
            products = self._counter.get_total_flops() / 2 - flops - (self._layers - layers)
            self.rest[path] = self.rest.get(path, 0.0) + products

        return leave


def _uses(
    part: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Iterator[tuple[Tensor, float]]:
    """Weights that ``part`` has just applied itself, and to how many positions."""
    if isinstance(part, (*DIRECT, nn.Linear)):
        channels = part.out_features if isinstance(part, nn.Linear) else part.out_channels
        yield part.weight, output.numel() / channels
    elif isinstance(part, TRANSPOSED):
        yield part.weight, inputs[0].numel() / part.in_channels
    elif isinstance(part, nn.MultiheadAttention):
        query, key, value = [
            inputs[place] if place < len(inputs) else kwargs[name]
            for place, name in enumerate(("query", "key", "value"))
        ]
        rows = [tensor.numel() / tensor.shape[-1] for tensor in (query, key, value)]
        own = dict(part.named_parameters(recurse=False))
        if "in_proj_weight" in own:
            yield own["in_proj_weight"], sum(rows) / 3
        else:
            yield from zip((own[f"{name}_proj_weight"] for name in "qkv"), rows, strict=True)
        if type(part).forward is nn.MultiheadAttention.forward:  # which reads the weight past the layer
            yield part.out_proj.weight, rows[0]


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _unfused_attention() -> Iterator[None]:
    """Let ``nn.MultiheadAttention`` do its products one by one: fused ones are not counted."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _cpu_attention() -> dict[Any, Any]:
    """Torch's counter has no entry for the fused attention of CPUs."""

    def count(query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, **kwargs: Any) -> int:
        batch, heads, length, width = query
        return 2 * batch * heads * length * key[2] * (width + value[3])

    return {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count}
