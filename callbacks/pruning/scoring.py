"""What a criterion sees of every step: gradients of weights, and of gates on whole layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist._lightning import Trainer
from robustdist.pruning.example import num_rows
from robustdist.pruning.gates import Gates
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.importance import Criterion, Taylor
from robustdist.pruning.projections import is_below
from robustdist.pruning.sample_gates import SampleGates

__all__ = ["Scoring", "reduced_gradients", "scale_of"]


def reduced_gradients(trainer: Trainer, gates: Gates) -> dict[str, Tensor]:
    """Take the gates' gradients, their mean over the ranks, in the scale of the loss. A collective."""
    taken = gates.gradients(lambda row: trainer.strategy.reduce(row, reduce_op="mean"))
    return {name: gradient / scale_of(trainer) for name, gradient in taken.items()}


def scale_of(trainer: Trainer) -> float:
    """Return what a gradient scaler multiplies the loss by."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


class Scoring:
    """Shows a criterion every step, until the units are removed.

    Args:
        criterion: One that needs gradients.
        module: The dense module; its layers get gates at 1, through which they compute what they did.
        groups: Groups of its units.
        tensors: As from :func:`robustdist.pruning.importance.named_tensors`.
    """

    def __init__(
        self, criterion: Criterion, module: nn.Module, groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]
    ) -> None:
        self._criterion, self._groups, self._tensors = criterion, groups, tensors
        self._samples: _Samples | None = None
        if isinstance(criterion, Taylor) and criterion.per_sample:
            self._samples = _Samples(criterion, module, groups)
        self._gates = Gates(module, [group for group in groups if group.layers]).install()

    def before_batch(self, batch: Any) -> None:
        """Note how many samples the next batch has; several may make up a step."""
        if self._samples is not None:
            self._samples.before_batch(num_rows(batch))

    def before_step(self, trainer: Trainer, optimizer: Any) -> None:
        """Score units by the reduced gradients of this step, if they are finite."""
        groups = [group for group in self._groups if self._is_read(group, optimizer)]
        tensors = dict(self._tensors)
        if any(group.layers for group in groups):
            for name, gradient in reduced_gradients(trainer, self._gates).items():
                tensors[name] = torch.ones_like(gradient)
                tensors[name].grad = gradient
        if self._samples is not None:
            self._samples.before_step(trainer, groups)
            return
        gates = [tensors[group.name].grad for group in groups if group.layers]
        if _all_finite([*gates, *(p.grad for part in optimizer.param_groups for p in part["params"])]):
            self._criterion.observe(groups, tensors)

    def close(self) -> None:
        """Take the gates away."""
        self._gates.remove()
        if self._samples is not None:
            self._samples.close()

    def _is_read(self, group: UnitGroup, optimizer: Any) -> bool:
        """Whether ``optimizer`` holds something that reads the units, or is in the layers."""
        held = {id(parameter) for part in optimizer.param_groups for parameter in part["params"]}
        inside = (t for name, t in self._tensors.items() if any(is_below(name, path) for path in group.layers))
        readers = inside if group.layers else (self._tensors[member.tensor] for member in group.consumers)
        return any(id(tensor) in held for tensor in readers)


class _Samples:
    """What single samples say, over the batches of a step and over the ranks."""

    def __init__(self, criterion: Taylor, module: nn.Module, groups: Sequence[UnitGroup]) -> None:
        self._criterion, self._groups = criterion, groups
        self._gates = SampleGates(module, groups).install()
        self._num_samples = 0
        self._rows: list[dict[str, Tensor]] = []

    def before_batch(self, num_samples: int) -> None:
        self._end_batch()
        self._num_samples = num_samples

    def before_step(self, trainer: Trainer, groups: Sequence[UnitGroup]) -> None:
        """Show the criterion the mean over samples and ranks. A collective."""
        self._end_batch()
        batches, self._rows = self._rows, []
        if not batches:
            return  # another optimiser has stepped after the same backward pass
        unscaled = trainer.accumulate_grad_batches / scale_of(trainer)
        means = []
        for group in self._groups:
            rows = [unscaled * batch[group.name] for batch in batches if group.name in batch]
            none = torch.zeros(1, group.size, dtype=torch.float64)  # no backward pass came by
            means.append(self._criterion.increment(torch.cat(rows or [none])).mean(0))
        row = trainer.strategy.reduce(torch.cat(means).to(trainer.strategy.root_device), reduce_op="mean").cpu()
        if bool(torch.isfinite(row).all()):
            found = dict(zip((group.name for group in self._groups), row.split([*map(len, means)]), strict=True))
            self._criterion.add({group.name: found[group.name] for group in groups})

    def close(self) -> None:
        self._gates.remove()

    def _end_batch(self) -> None:
        """Of a loss that is a mean, a sample has the N-th part."""
        if self._num_samples:
            taken = self._gates.take(self._num_samples)
            if taken:
                self._rows.append({name: self._num_samples * rows for name, rows in taken.items()})


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
