"""One multiplier per unit, in front of all layers that read it: what masks are learned with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.compiled import forget_compiled
from robustdist.errors import UsageError
from robustdist.pruning.depth import BlockGate
from robustdist.pruning.gate_hooks import GateHooks
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.importance import Criterion, Magnitude, distinct, named_tensors

__all__ = ["Gates", "LearnedScores", "fold"]


class Gates(GateHooks):
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
        >>> from robustdist.pruning.groups import Member
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> group = UnitGroup("0", "ffn", 3, (Member("2.weight", 1, torch.arange(3), "consumer"),))
        >>> with Gates(net, [group]) as gates:
        ...     gates.set({"0": torch.tensor([1.0, 0.0, 0.5])})
        ...     net(torch.ones(1, 2)).sum().backward()
        ...     gates.gradients()["0"].shape
        torch.Size([3])
    """

    def __init__(self, module: nn.Module, groups: Sequence[UnitGroup]) -> None:
        super().__init__(module, groups)
        #: Name of a group -> its values, shape (size,), leaves that collect a gradient.
        self.values: dict[str, Tensor] = {}
        tensors = named_tensors(module)
        for group in self._groups:
            own = [next(module.get_submodule(path).parameters()) for path in group.layers[:1]]
            weight = next((tensors[member.tensor] for member in group.consumers), own[0] if own else torch.ones(()))
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.values[group.name] = torch.ones(group.size, dtype=dtype, device=weight.device, requires_grad=True)

    def install(self) -> Gates:
        """Put the gates in front of the layers, and behind whole layers; once."""
        if not self.installed:
            super().install()
            for group in self._groups:
                for unit, path in enumerate(group.layers):
                    block = self._module.get_submodule(path)
                    gate = BlockGate(partial(self._value, group.name, unit), block)
                    self._handles.append(block.register_forward_hook(gate, with_kwargs=True))
            if any(group.layers for group in self._groups):
                forget_compiled(self._module)
        return self

    def multiplied(self, x: Tensor, group: str, units: Tensor, axis: int) -> Tensor:
        """Return ``x`` times the values of the group."""
        values = self.values[group].to(x.device)
        # index -1, no unit of this group, picks the 1 at the end
        row = torch.cat([values, values.new_ones(1)])[units.to(x.device)]
        return x * row.to(x.dtype).reshape(-1, *[1] * (-1 - axis))

    def _value(self, group: str, unit: int) -> Tensor | None:
        if not self.installed:
            return None
        self.reached.add(group)
        return self.values[group][unit]

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
        self.check_reached()
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
