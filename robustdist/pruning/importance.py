"""How much every unit matters: scores in float64, larger for units that should stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.projections import is_below

__all__ = [
    "CRITERIA",
    "BNScale",
    "Criterion",
    "Magnitude",
    "Movement",
    "Random",
    "Taylor",
    "distinct",
    "gate_gradient",
    "make_criterion",
    "named_tensors",
    "slimming_penalty",
]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all their names; shared ones are the same object under each."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def distinct(members: Iterable[Member], tensors: Mapping[str, Tensor]) -> Iterator[tuple[Member, Tensor]]:
    """Yield members with their tensors; a tensor that several layers share counts once per dimension."""
    seen = set()
    for member in members:
        tensor = tensors[member.tensor]
        if (id(tensor), member.dim) not in seen:
            seen.add((id(tensor), member.dim))
            yield member, tensor


class Criterion(ABC):
    """Scores per unit. A new criterion is a subclass with ``score``, and a line in ``CRITERIA``.

    All that a score depends on is tensors that are the same on all ranks: weights, and gradients after their reduction.
    """

    #: Whether ``observe`` has to be called at every step before ``score``.
    needs_gradients = False

    def observe(self, groups: Iterable[UnitGroup], tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Look at one step: weights and ``.grad``, reduced over the ranks, not yet clipped, before the optimiser moves.

        Args:
            groups: The groups to be scored.
            tensors: As from :func:`named_tensors`.
        """

    @abstractmethod
    def score(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the scores of the units of ``group``, shape (size,), float64, on the CPU."""

    def state_dict(self) -> dict[str, Any]:
        """Return what ``observe`` has gathered: tensors and plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            UsageError: If the state is that of another criterion.
        """
        if state:
            raise UsageError(
                f"{type(self).__name__} has no state, the checkpoint has {', '.join(state)}: keep its method"
            )


class Magnitude(Criterion):
    r"""Mean p-norm of a unit over the weights that would vanish with it.

    .. math:: I_k = \frac{S_k}{\frac{1}{K} \sum_j S_j}, \quad S_k = \frac{1}{M} \sum_m \sum_{i \in k} |w^m_i|^p

    over the M weights of the group, producers' rows, consumers' columns, scales of norms; no biases, no statistics; of
    a layer, over all weights in it. Divided by its mean, groups can be ranked together.

    Args:
        p: 1 or 2.

    Raises:
        UsageError: If ``p`` is something else.

    References:
        Li et al., "Pruning Filters for Efficient ConvNets"; Fang et al., "DepGraph: Towards Any Structural Pruning".
    """

    def __init__(self, *, p: int = 2) -> None:
        if p not in (1, 2):
            raise UsageError(f"p={p!r} is no norm for magnitude: use 1 or 2")
        self.p = p

    def score(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the norms over their mean."""
        norms = [
            group.per_unit(member, tensor.detach().double().abs() ** self.p)
            for member, tensor in distinct(group.members, tensors)
            if _is_weight(member.tensor, tensor)
        ]
        total = self._of_layers(group, tensors) if group.layers else torch.stack(norms).mean(0).cpu()
        return total / total.mean().clamp(min=torch.finfo(torch.float64).tiny)

    def _of_layers(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        sums = []
        for path in group.layers:
            inside = {id(t): t for name, t in tensors.items() if is_below(name, path) and _is_weight(name, t)}
            norms = [(tensor.detach().double().abs() ** self.p).sum().cpu() for tensor in inside.values()]
            sums.append(torch.stack(norms).mean())
        return torch.stack(sums)


def _is_weight(name: str, tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and name.rpartition(".")[2] != "bias"


class BNScale(Criterion):
    r"""The scale of batch norms, :math:`I_k = \frac{1}{M} \sum_m |\gamma^m_k|` over the M batch norms of the group.

    Those that a residual connection ties are one group. Train with :func:`slimming_penalty` to tell scales apart.

    References:
        Liu et al., "Learning Efficient Convolutional Networks through Network Slimming".
    """

    def score(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the mean absolute scales.

        Raises:
            UsageError: If the group has no batch norm with a scale.
        """
        scales = [group.per_unit(member, gamma.detach().double().abs()) for member, gamma in _scales(group, tensors)]
        if not scales:
            raise UsageError(f"method='bn_scale': group {group.name} has no batch norm: ignore it, or use 'magnitude'")
        return torch.stack(scales).mean(0).cpu()


def _scales(group: UnitGroup, tensors: Mapping[str, Tensor]) -> list[tuple[Member, Tensor]]:
    return [
        (member, tensor)
        for member, tensor in distinct(group.members, tensors)
        if member.tensor.endswith(".weight") and f"{member.tensor.removesuffix('weight')}running_var" in tensors
    ]


def slimming_penalty(groups: Iterable[UnitGroup], tensors: Mapping[str, Tensor], *, lam: float = 1e-4) -> Tensor:
    r"""Return :math:`\lambda \sum_k \frac{1}{M} \sum_m |\gamma^m_k|`: lam times the scores of :class:`BNScale`.

    Add it to the loss; it has a gradient. Groups without batch norm add nothing.

    Args:
        groups: Groups of channels.
        tensors: As from :func:`named_tensors`.
        lam: Weight; 1e-4 for plain networks, 1e-5 for residual ones are usual.

    References:
        Liu et al., "Learning Efficient Convolutional Networks through Network Slimming".
    """
    total = torch.zeros(())
    for group in groups:
        scales = _scales(group, tensors)
        for member, gamma in scales:
            total = total.to(gamma.device) + gamma[member.units.to(gamma.device) >= 0].abs().sum() / len(scales)
    return lam * total


def gate_gradient(group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
    r"""Return :math:`\partial L / \partial g_k` of multipliers g = 1 on units, in front of all layers that read them.

    .. math:: \frac{\partial L}{\partial g_k} = \sum_{consumers} \sum_{i \in k} w_i \frac{\partial L}{\partial w_i}

    No hook is needed, and gradients that are the same on all ranks give the same here. A weight that is also used
    elsewhere (tied embeddings) brings the gradient of that use along. A weight without gradient in this step adds 0.

    Layers have no such weights: theirs is the ``.grad`` of ``tensors[group.name]``, as from
    :meth:`~robustdist.pruning.gates.Gates.gradients`.

    Returns:
        Shape (size,), float64, on the CPU.

    Raises:
        UsageError: If a consumer is frozen, so that it never has a gradient.
    """
    total = torch.zeros(group.size, dtype=torch.float64)
    if group.layers and (gradient := tensors[group.name].grad) is not None:
        total += gradient.double().cpu()
    for member, weight in distinct(group.consumers, tensors):
        if not weight.requires_grad:
            raise UsageError(
                f"group {group.name} is read by {member.tensor}, which is frozen and has no gradient: unfreeze it, put "
                "the group into ignore, or use method='magnitude'"
            )
        if weight.grad is not None:
            total += group.per_unit(member, weight.detach().double() * weight.grad.double()).cpu()
    return total


class _Gathering(Criterion):
    """Adds up something of the gate gradient of every step."""

    needs_gradients = True

    def __init__(self) -> None:
        self.steps = 0
        self.sums: dict[str, Tensor] = {}

    @abstractmethod
    def increment(self, gradient: Tensor) -> Tensor:
        """Return what one step adds, given its gate gradient."""

    def observe(self, groups: Iterable[UnitGroup], tensors: Mapping[str, Tensor]) -> None:
        self.add({group.name: self.increment(gate_gradient(group, tensors)) for group in groups})

    def add(self, increments: Mapping[str, Tensor]) -> None:
        """Add what one step adds to groups, shape (size,) each."""
        self.steps += 1
        for name, new in increments.items():
            self.sums[name] = self.sums[name] + new if name in self.sums else new

    def score(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        if group.name not in self.sums:
            raise UsageError(
                f"{type(self).__name__} has seen no step of group {group.name}: let it observe() gradients before it "
                "scores, or use method='magnitude'"
            )
        return self.sums[group.name] / self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": {name: total.clone() for name, total in self.sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"steps", "sums"}:
            raise UsageError(f"the checkpoint has no scores of {type(self).__name__}: keep the method of the run")
        self.steps = int(state["steps"])
        self.sums = {name: total.clone() for name, total in state["sums"].items()}

    def reset(self) -> None:
        """Forget all steps, as after a removal."""
        self.steps, self.sums = 0, {}


class Taylor(_Gathering):
    r"""First-order change of the loss when a unit goes: :math:`E[(\partial L / \partial g_k)^2]` over the steps.

    g is the multiplier of :func:`gate_gradient`. With an attacked loss the scores are those of the robust loss.

    With ``per_sample`` a sample has a multiplier of its own, and the mean goes over samples:
    :math:`E_n[(N \, \partial L / \partial g_{nk})^2]`, which for a loss that is a mean over N samples is the square of
    the sample's own gradient. Units that matter to samples in opposite directions then do not cancel. The rows come
    from :class:`~robustdist.pruning.sample_gates.SampleGates`, to :meth:`add`.

    Args:
        absolute: :math:`E|\partial L / \partial g_k|` instead, as is usual for heads.
        per_sample: Whether samples count one by one.

    References:
        Molchanov et al., "Importance Estimation for Neural Network Pruning"; Michel et al., "Are Sixteen Heads Really
        Better than One?".
    """

    def __init__(self, *, absolute: bool = False, per_sample: bool = False) -> None:
        super().__init__()
        self.absolute = absolute
        self.per_sample = per_sample

    def increment(self, gradient: Tensor) -> Tensor:
        """Return the square or the absolute value."""
        return gradient.abs() if self.absolute else gradient**2


class Movement(_Gathering):
    r"""Units whose weights move towards zero go: :math:`I_k = -E[\sum_{i \in k} w_i \, \partial L / \partial w_i]`.

    The sum over steps is what a straight-through mask score would have become at a constant learning rate. A unit held
    at zero has no gradient and stays where it is; :class:`~robustdist.pruning.gates.LearnedScores` lets it return.

    References:
        Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning".
    """

    def increment(self, gradient: Tensor) -> Tensor:
        """Return the negative gradient."""
        return -gradient


class Random(Criterion):
    """Uniform draws from (seed, name of the group): the baseline, the same on all ranks.

    Args:
        seed: Seed.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def score(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the draws."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "random units", group.name))
        return torch.rand(group.size, generator=generator, dtype=torch.float64)


#: Name of a method -> what makes its criterion.
CRITERIA: dict[str, Callable[..., Criterion]] = {
    "magnitude": Magnitude,
    "bn_scale": BNScale,
    "taylor": Taylor,
    "movement": Movement,
    "random": Random,
}


def make_criterion(method: str, **options: Any) -> Criterion:
    """Return the criterion of that name.

    Raises:
        UsageError: If there is none, or it does not know an option.
    """
    if method not in CRITERIA:
        raise UsageError(f"method={method!r} is unknown: use one of {', '.join(CRITERIA)}")
    try:
        return CRITERIA[method](**options)
    except TypeError as error:
        raise UsageError(f"method={method!r} does not take {', '.join(options)}: {error}") from error
