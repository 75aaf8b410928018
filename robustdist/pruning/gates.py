"""One multiplier per unit, in front of all layers that read it: what masks are learned with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.compiled import forget_compiled
from robustdist.errors import UsageError
from robustdist.pruning.depth import BlockGate
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.importance import Criterion, Magnitude, distinct, named_tensors
from robustdist.pruning.layers import DIRECT

__all__ = ["Gates", "LearnedScores", "fold"]


class Gates:
    r"""Multiplies the inputs of every layer that reads a unit by that unit's value :math:`z_k`, at first 1.

    With z = 0 a unit is gone from all that follows. The values are leaves of autograd's graph, so their gradient is
    :math:`\partial L / \partial z_k`, summed over the backward passes since it was last taken. The module gets forward
    pre-hooks and nothing else: no parameters, no buffers, no other keys in its ``state_dict``. A copy of the module
    made meanwhile is multiplied by the same values, until the gates are removed.

    Units of kind "hidden" are read by norms too, whose statistics go over all of them: there a gate at 0 is not the
    same as removal. Of kind "layers" the value mixes what a block returns with what it is given,
    :class:`~robustdist.pruning.depth.BlockGate`.

    Args:
        module: The dense module. Attention of torch's own class does not call its output layer: its class has to be
            changed first, as for a removal.
        groups: Groups of units of ``module``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> group = UnitGroup("0", "ffn", 3, (Member("2.weight", 1, torch.arange(3), "consumer"),))
        >>> with Gates(net, [group]) as gates:
        ...     gates.set({"0": torch.tensor([1.0, 0.0, 0.5])})
        ...     net(torch.ones(1, 2)).sum().backward()
        ...     gates.gradients()["0"].shape
        torch.Size([3])
    """

    def __init__(self, module: nn.Module, groups: Sequence[UnitGroup]) -> None:
        self._module, self._groups = module, list(groups)
        self._handles: list[Any] = []
        #: Whether the values are multiplied in; hooks in copies of the module ask too.
        self.installed = False
        #: Groups that a forward pass has come by.
        self.reached: set[str] = set()
        #: Name of a group -> its values, shape (size,), leaves that collect a gradient.
        self.values: dict[str, Tensor] = {}
        tensors = named_tensors(module)
        for group in self._groups:
            own = [next(module.get_submodule(path).parameters()) for path in group.layers[:1]]
            weight = next((tensors[member.tensor] for member in group.consumers), own[0] if own else torch.ones(()))
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.values[group.name] = torch.ones(group.size, dtype=dtype, device=weight.device, requires_grad=True)

    def install(self) -> Gates:
        """Put the gates in front of the layers; once."""
        if not self.installed:
            places = [place for group in self._groups for place in _gates_of(self, self._module, group)]
            self._handles = [part.register_forward_pre_hook(gate, with_kwargs=True) for part, gate in places]
            for group in self._groups:
                for unit, path in enumerate(group.layers):
                    block = self._module.get_submodule(path)
                    gate = BlockGate(partial(self._value, group.name, unit), block)
                    self._handles.append(block.register_forward_hook(gate, with_kwargs=True))
            self.installed = True
            if self._handles:
                forget_compiled(self._module)
        return self

    def _value(self, group: str, unit: int) -> Tensor | None:
        if not self.installed:
            return None
        self.reached.add(group)
        return self.values[group][unit]

    def remove(self) -> None:
        """Take the gates away, also out of effect in copies of the module."""
        self.installed = False
        if self._handles:
            forget_compiled(self._module)
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Gates:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Replace the values of groups, between a backward pass and the next forward pass; their gradient is dropped.

        Args:
            values: Name of a group -> shape (size,).
        """
        for name, new in values.items():
            old = self.values[name]
            self.values[name] = new.detach().to(old.device, old.dtype, copy=True).requires_grad_()

    def gradients(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        """Take the gradients of the values, zero where no backward pass came by, and start at zero again.

        Args:
            reduce: Maps the gradients of all groups, in one row, to their mean over the ranks; called exactly once, so
                that it may communicate. Without it they are those of this rank.

        Returns:
            Name of a group -> shape (size,), float64, on the CPU.

        Raises:
            UsageError: If no forward pass has ever come by a gate.
        """
        missing = [group for group in self._groups if group.name not in self.reached]
        if missing:
            readers = ", ".join([member.tensor for member in missing[0].consumers] or missing[0].layers) or "no layer"
            raise UsageError(
                f"group {missing[0].name} is read by {readers}, which no forward pass has called as a layer: put the "
                "group into ignore"
            )
        rows = [
            torch.zeros_like(value) if value.grad is None else value.grad.detach() for value in self.values.values()
        ]
        for value in self.values.values():
            value.grad = None
        if not rows:
            return {}
        row = torch.cat([part.to(rows[0]) for part in rows])
        row = (row if reduce is None else reduce(row)).double().cpu()
        return dict(zip(self.values, torch.split(row, [len(part) for part in rows]), strict=True))


class _Gate:
    """Forward pre-hook of one layer for one group."""

    def __init__(self, gates: Gates, group: UnitGroup, units: Tensor, axis: int, names: tuple[str, ...]) -> None:
        self.gates, self.group, self.units, self.axis, self.names = gates, group.name, units, axis, names

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return self

    def __call__(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.gates.installed:
            return None
        self.gates.reached.add(self.group)
        done: dict[int, Tensor] = {}  # attention asks whether query, key and value are one and the same

        def gated(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in done:
                done[id(x)] = x * self._factor(x)
            return done[id(x)]

        count = len(self.names)
        args = (*(gated(x) for x in args[:count]), *args[count:])
        return args, {name: gated(value) if name in self.names else value for name, value in kwargs.items()}

    def _factor(self, x: Tensor) -> Tensor:
        values = self.gates.values[self.group].to(x.device)
        # index -1, no unit of this group, picks the 1 at the end
        row = torch.cat([values, values.new_ones(1)])[self.units.to(x.device)]
        return row.to(x.dtype).reshape(-1, *[1] * (-1 - self.axis))


def _gates_of(gates: Gates, module: nn.Module, group: UnitGroup) -> Iterator[tuple[nn.Module, _Gate]]:
    """All layers that hold a weight which reads the group, a shared layer once, layers with a shared weight each."""
    for member, weight in distinct(group.consumers, named_tensors(module)):
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter is weight:
                    yield part, _gate(gates, group, member, part, name, weight)


def _gate(gates: Gates, group: UnitGroup, member: Member, part: nn.Module, name: str, weight: Tensor) -> _Gate:
    names: tuple[str, ...] = ("input",)
    if isinstance(part, nn.MultiheadAttention):
        names = ("query", "key", "value")
        if name != "in_proj_weight":
            raise UsageError(
                f"group {group.name} is read by {member.tensor}, one of three weights of nn.MultiheadAttention: put "
                "the group into ignore"
            )
    repeats = part.groups if isinstance(part, DIRECT) and member.dim == 1 else 1
    # channels stand before the positions of a convolution, and last elsewhere
    return _Gate(gates, group, member.units.repeat(repeats), min(1 - weight.dim(), -1), names)


@torch.no_grad()
def fold(module: nn.Module, groups: Sequence[UnitGroup], values: Mapping[str, Tensor]) -> None:
    """Multiply values of units into the weights that read them: without gates the module computes the same.

    Optimiser state is left as it is.

    Args:
        module: Changed in place.
        groups: Groups of units of ``module``.
        values: Name of a group -> shape (size,); groups that are missing stay as they are.

    Raises:
        UsageError: If a weight also serves a layer that does not read the units, such as a tied embedding.
    """
    tensors = named_tensors(module)
    for group in groups:
        if group.name not in values:
            continue
        reading = {(id(tensors[member.tensor]), member.dim) for member in group.consumers}
        for member in group.members:
            if member.role != "consumer" and (id(tensors[member.tensor]), member.dim) in reading:
                raise UsageError(
                    f"group {group.name}: {member.tensor} both makes and reads its units, so learned values cannot be "
                    "multiplied into it: put the group into ignore"
                )
        for member, weight in distinct(group.consumers, tensors):
            row = torch.cat([values[group.name].double().cpu(), torch.ones(1, dtype=torch.float64)])[member.units]
            shape = [-1 if dim == member.dim else 1 for dim in range(weight.dim())]
            weight.mul_(row.to(weight.device, weight.dtype).reshape(shape))


class LearnedScores(Criterion):
    r"""One learned score per unit; the forward pass uses the units with the best scores, the backward pass all.

    .. math:: z_k = 1[s_k \text{ among the best}], \quad v \leftarrow \mu v + \partial L / \partial z_k, \quad
        s_k \leftarrow s_k - \eta \, v

    (straight-through). Movement pruning starts at s = 0. HYDRA's scores are ranked by :math:`|s|`, whose sign the
    gradient takes, and start at the norm of the group over its mean. At each step: select units by these scores, set
    the gates to the selection, train, take the gates' gradients and call :meth:`step` with them.

    Args:
        initial: Name of a group -> scores to start with.
        lr: Learning rate :math:`\eta`.
        momentum: :math:`\mu`.
        absolute: Whether :math:`|s|` ranks.

    References:
        Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning"; Sehwag et al., "HYDRA: Pruning Adversarially
        Robust Neural Networks".
    """

    def __init__(
        self, initial: Mapping[str, Tensor], *, lr: float = 0.01, momentum: float = 0.0, absolute: bool = False
    ) -> None:
        self.lr, self.momentum, self.absolute = lr, momentum, absolute
        self.values = {name: values.detach().double().cpu().clone() for name, values in initial.items()}
        self.velocity = {name: torch.zeros_like(values) for name, values in self.values.items()}

    @classmethod
    def movement(cls, groups: Sequence[UnitGroup], *, lr: float = 0.01) -> LearnedScores:
        """Start at 0, as movement pruning does."""
        return cls({group.name: torch.zeros(group.size) for group in groups}, lr=lr)

    @classmethod
    def hydra(
        cls, groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor], *, lr: float = 0.1, momentum: float = 0.9
    ) -> LearnedScores:
        """Start at the normalised norms, as HYDRA does; its weights stay frozen while scores are learned."""
        norms = {group.name: Magnitude(p=2).score(group, tensors).sqrt() for group in groups}
        initial = {name: norm / norm.mean().clamp(min=1e-12) for name, norm in norms.items()}
        return cls(initial, lr=lr, momentum=momentum, absolute=True)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Move the scores against the gradients of the gates, which are the same on all ranks."""
        for name, gradient in gradients.items():
            own = gradient.double().cpu()
            own = own * self.values[name].sign() if self.absolute else own
            self.velocity[name] = self.momentum * self.velocity[name] + own
            self.values[name] = self.values[name] - self.lr * self.velocity[name]

    def score(self, group: UnitGroup, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the scores, or their absolute values."""
        values = self.values[group.name]
        return values.abs() if self.absolute else values.clone()

    def state_dict(self) -> dict[str, Any]:
        """Return scores and velocities."""
        return {
            "values": {name: value.clone() for name, value in self.values.items()},
            "velocity": {name: value.clone() for name, value in self.velocity.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            UsageError: If it is that of other groups.
        """
        sizes = {name: len(value) for name, value in self.values.items()}
        if {name: len(value) for name, value in state.get("values", {}).items()} != sizes:
            raise UsageError("the checkpoint has no learned scores of these groups: keep method and model of the run")
        self.values = {name: value.clone() for name, value in state["values"].items()}
        self.velocity = {name: value.clone() for name, value in state["velocity"].items()}
