"""Masks that are learned with the weights: hard-concrete gates under a constraint on what is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.pruning.cost import CostModel
from robustdist.pruning.groups import Kind, UnitGroup
from robustdist.pruning.selection import Removed, Target

__all__ = ["LearnedMasks", "gate_sample", "keep_probability", "lagrangian", "soft_value"]

#: Stretch of the concrete distribution below 0 and above 1, its temperature, and how near draws come to 0 and 1.
_GAMMA, _ZETA, _BETA, _EPS = -0.1, 1.1, 2 / 3, 1e-6
#: log_alpha stays in this range, where its gradient has not vanished.
_LEAST, _MOST = math.log(0.01), math.log(100)


def gate_sample(log_alpha: Tensor, u: Tensor) -> Tensor:
    r"""Return a hard-concrete gate for each uniform draw.

    .. math:: z = \mathrm{clip}(s \, (\zeta - \gamma) + \gamma, 0, 1), \quad
        s = \sigma\big((\log u - \log(1 - u) + a) / \beta\big)

    with :math:`\gamma = -0.1, \zeta = 1.1, \beta = 2/3`.

    Args:
        log_alpha: a, any shape.
        u: In (0, 1), the same shape.

    References:
        Louizos et al., "Learning Sparse Neural Networks through L0 Regularization".

    Example:
        >>> gate_sample(torch.zeros(3), torch.tensor([0.1, 0.5, 0.9]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    s = torch.sigmoid((u.log() - (1 - u).log() + log_alpha) / _BETA)
    return (s * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def keep_probability(log_alpha: Tensor) -> Tensor:
    r"""Return :math:`P(z > 0) = \sigma(a - \beta \log(-\gamma / \zeta))`, held off 0 and 1 by 1e-6.

    Example:
        >>> keep_probability(torch.tensor([2.0, -2.0]))
        tensor([0.9734, 0.4010])
    """
    return torch.sigmoid(log_alpha - _BETA * math.log(-_GAMMA / _ZETA)).clamp(_EPS, 1 - _EPS)


def soft_value(log_alpha: Tensor) -> Tensor:
    r"""Return the value of a gate that is kept, when masks are fixed: :math:`\sigma(0.8 \, a / \beta)`."""
    return torch.sigmoid(0.8 * log_alpha / _BETA)


def lagrangian(sparsity: Tensor, target: float | Tensor, multipliers: Tensor) -> Tensor:
    r"""Return :math:`\lambda_1 (s - t) + \lambda_2 (s - t)^2`.

    Masks descend on it and multipliers ascend, so that it is zero at the end.

    Args:
        sparsity: Expected sparsity s, any shape.
        target: t.
        multipliers: :math:`\lambda_1, \lambda_2`, shape (2,).
    """
    return multipliers[0] * (sparsity - target) + multipliers[1] * (sparsity - target) ** 2


class LearnedMasks:
    r"""A hard-concrete gate per unit, trained with the weights until the expected size is the target.

    At each step: set gates (:class:`~robustdist.pruning.gates.Gates`) to ``sample(step)``, train, and give the gates'
    gradients, reduced over the ranks, to ``step``. It chains them to :math:`a` and adds the Lagrangian

    * of params and macs: :math:`\lambda_1 (s - t) + \lambda_2 (s - t)^2` of the whole, s from the expected cost;
    * of width and exact shapes: the mean over groups of the same, summed over kinds, s and t per group and a pair of
      multipliers per kind, so that every layer ends with its width.

    The target t ramps linearly over ``warmup_steps``. At the end ``removed()`` are the units that go, and those that
    stay have soft values: :func:`~robustdist.pruning.gates.fold` multiplies ``values()`` into the weights that read
    them, so that removal changes nothing; layers, which no single weight reads, are then at 1. State lives on the CPU
    in float64; it is the same on all ranks.

    Args:
        groups: Groups to learn masks of. For shapes, groups of other kinds stay whole.
        target: Anything but a latency.
        cost: For params and macs.
        warmup_steps: Steps until the full target counts; 20 % of the run is usual.
        total_steps: Steps over which both learning rates fall to a tenth, as half a cosine; ``None``: they stay.
        start: Sparsity at step 0.
        lr: Learning rate of the masks.
        multiplier_lr: Learning rate of the multipliers.
        init: Mean of :math:`a` at the start, for all units or by kind.
        init_std: Its standard deviation.
        seed: Seed of the start and of the samples.

    Raises:
        UsageError: If the target does not fit.

    References:
        Xia et al., "Structured Pruning Learns Compact and Accurate Models"; Xia et al., "Sheared LLaMA: Accelerating
        Language Model Pre-training via Structured Pruning".
    """

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        target: Target,
        *,
        cost: CostModel | None = None,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        start: float = 0.0,
        lr: float = 1.0,
        multiplier_lr: float = 1.0,
        init: float | Mapping[Kind, float] = 5.0,
        init_std: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.target, self.cost, self.start, self.seed = target, cost, start, seed
        self.warmup_steps, self.total_steps, self._rates = warmup_steps, total_steps, (lr, multiplier_lr)
        self.widths = _widths(groups, target, cost)
        self.groups = [group for group in groups if self.widths is None or group.name in self.widths]
        self.log_alpha: dict[str, nn.Parameter] = {}
        for group in self.groups:
            mean = init.get(group.kind, 5.0) if isinstance(init, Mapping) else init
            noise = torch.randn(group.size, generator=self._generator("start", group), dtype=torch.float64)
            self.log_alpha[group.name] = nn.Parameter((mean + init_std * noise).clamp(_LEAST, _MOST))
        self.kinds = ["whole"] if self.widths is None else sorted({group.kind for group in self.groups})
        #: lambda_1 and lambda_2 of every kind, or of the whole.
        self.multipliers = nn.Parameter(torch.zeros(len(self.kinds), 2, dtype=torch.float64))
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [*self.log_alpha.values()], "lr": lr},
                {"params": [self.multipliers], "lr": multiplier_lr, "maximize": True},
            ],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def _generator(self, purpose: str, group: UnitGroup, step: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "hard concrete", purpose, group.name, step))

    def _drawn(self, step: int) -> dict[str, Tensor]:
        drawn = {}
        for group in self.groups:
            u = torch.rand(group.size, generator=self._generator("sample", group, step), dtype=torch.float64)
            z = gate_sample(self.log_alpha[group.name], u.clamp(_EPS, 1 - _EPS))
            drawn[group.name] = _with_locked(group, z)
        return drawn

    @torch.no_grad()
    def sample(self, step: int) -> dict[str, Tensor]:
        """Return the gates of a step, drawn from (seed, step), the same on all ranks and for all its micro-batches."""
        return self._drawn(step)

    def probabilities(self) -> dict[str, Tensor]:
        """Return the probability that each unit is kept, shape (size,) per group, with a gradient."""
        return {group.name: _with_locked(group, keep_probability(self.log_alpha[group.name])) for group in self.groups}

    def sparsities(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return expected and final sparsity of the whole or of every group, and the row of multipliers each has."""
        keep = self.probabilities()
        if self.widths is None:
            left, dense = _share(self.cost, keep, self.target)
            return (1 - left / dense)[None], torch.tensor([1 - self.target.value]).double(), torch.zeros(1).long()
        expected = torch.stack([1 - keep[group.name].mean() for group in self.groups])
        final = torch.tensor([1 - self.widths[group.name] / group.size for group in self.groups], dtype=torch.float64)
        return expected, final, torch.tensor([self.kinds.index(group.kind) for group in self.groups])

    def progress(self, step: int) -> float:
        """Return how much of the way from the first to the full target is behind at ``step``."""
        return min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0

    def _decay(self, step: int) -> float:
        if self.total_steps is None:
            return 1.0
        done = min(1.0, step / self.total_steps)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

    def loss(self, step: int) -> Tensor:
        """Return the Lagrangian at ``step``, a scalar with a gradient."""
        expected, final, rows = self.sparsities()
        target = self.start + self.progress(step) * (final - self.start)
        terms = lagrangian(expected, target, self.multipliers[rows].T)
        counts = torch.bincount(rows, minlength=len(self.kinds))
        return (terms / counts[rows]).sum()

    @torch.enable_grad()
    def step(self, gradients: Mapping[str, Tensor], step: int) -> None:
        """Let masks descend and multipliers ascend; :math:`a` stays between log 0.01 and log 100.

        Args:
            gradients: Of the loss by the gates of ``sample(step)``, the same on all ranks.
            step: Number of the optimiser step, the one that was sampled.
        """
        drawn = self._drawn(step)
        chained = torch.stack([(drawn[name] * gradients[name].double().cpu()).sum() for name in drawn]).sum()
        for part, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            part["lr"] = rate * self._decay(step)
        self._optimizer.zero_grad()
        torch.autograd.backward([chained + self.loss(step)])
        self._optimizer.step()
        with torch.no_grad():
            for values in self.log_alpha.values():
                values.clamp_(_LEAST, _MOST)

    def scores(self) -> dict[str, Tensor]:
        """Return :math:`a` as scores, for :func:`~robustdist.pruning.selection.select`."""
        return {name: values.detach().clone() for name, values in self.log_alpha.items()}

    @torch.no_grad()
    def removed(self) -> Removed:
        """Return the units that go, those with the smallest :math:`a`, ties by position.

        For width and shapes exactly as many as the target says; else ``size - sum P(z > 0)``, rounded, of each group,
        and one unit stays.
        """
        result = {}
        for group in self.groups:
            keep = _with_locked(group, keep_probability(self.log_alpha[group.name]))
            kept = max(1, math.floor(float(keep.sum()) + 0.5)) if self.widths is None else self.widths[group.name]
            order = [
                unit
                for unit in torch.sort(self.log_alpha[group.name].detach(), stable=True).indices.tolist()
                if unit not in group.locked
            ]
            if kept < group.size:
                result[group.name] = sorted(order[: group.size - kept])
        return result

    @torch.no_grad()
    def values(self, removed: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
        """Return fixed gates, as for evaluation: soft values of units that stay (of layers 1), 0 for ``removed``."""
        gone = self.removed() if removed is None else removed
        result = {}
        for group in self.groups:
            soft = soft_value(self.log_alpha[group.name])
            result[group.name] = torch.ones_like(soft) if group.layers else _with_locked(group, soft)
            result[group.name][list(gone.get(group.name, ()))] = 0
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return masks, multipliers and the state of their optimiser: tensors and plain types."""
        return {
            "log_alpha": self.scores(),
            "multipliers": self.multipliers.detach().clone(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            UsageError: If it is that of other groups or another target.
        """
        sizes = {name: len(values) for name, values in self.log_alpha.items()}
        found = {name: len(values) for name, values in state.get("log_alpha", {}).items()}
        if found != sizes or state["multipliers"].shape != self.multipliers.shape:
            raise UsageError("the checkpoint has no masks of these groups: keep method, target and model of the run")
        with torch.no_grad():
            for name, values in state["log_alpha"].items():
                self.log_alpha[name].copy_(values)
            self.multipliers.copy_(state["multipliers"])
        self._optimizer.load_state_dict(state["optimizer"])


def _with_locked(group: UnitGroup, values: Tensor) -> Tensor:
    """Units that may never go are at 1."""
    if not group.locked:
        return values
    locked = torch.zeros(group.size, dtype=torch.bool)
    locked[list(group.locked)] = True
    return torch.where(locked, torch.ones_like(values), values)


def _share(cost: CostModel | None, keep: Mapping[str, Tensor], target: Target) -> tuple[Tensor, int]:
    if cost is None:
        raise UsageError(f"target {target.name} needs cost=, a CostModel of the module: give it")
    params, macs = cost.expected(keep)
    return (params, cost.dense.params) if target.name == "params" else (macs, cost.dense.macs)


def _widths(groups: Sequence[UnitGroup], target: Target, cost: CostModel | None) -> dict[str, int] | None:
    """Width that every group with a mask is to have; ``None`` if only the whole counts."""
    if target.name == "latency_ms":
        raise UsageError("learned masks cannot aim at latency_ms: use params, macs, width or an exact shape")
    if target.name in ("params", "macs"):
        if cost is None or not getattr(cost.dense, target.name):
            raise UsageError(f"target {target.name} needs cost=, a CostModel that counts {target.name}: give it")
        return None
    widths = {}
    for group in groups:
        if target.name == "width" or group.kind in target.shape:
            share = max(1, math.floor(target.value * group.size + 0.5))
            width = share if target.name == "width" else target.shape[group.kind]
            if not max(1, len(group.locked)) <= width <= group.size:
                raise UsageError(
                    f"target {target.name} of {width} does not fit group {group.name}, which can have "
                    f"{max(1, len(group.locked))} to {group.size}: change it, or put the group into ignore"
                )
            widths[group.name] = width
    if not widths:
        raise UsageError(f"target {dict(target.shape)}: the model has no such groups; name kinds that it has")
    return widths
