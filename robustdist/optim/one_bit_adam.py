"""Adam whose momentum is averaged in one bit per entry, once its variance is frozen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from robustdist.errors import RobustDistWarning, UsageError
from robustdist.types import check_count

__all__ = ["OneBitAdam", "Reduce"]

#: Averages tensors over the ranks, in place. A value that is not finite on one rank comes out so on all of them, and
#: leaves no trace in what the callable remembers. A tensor of two elements called "faults" is averaged exactly.
Reduce: TypeAlias = Callable[[Mapping[str, Tensor]], None]


class OneBitAdam(Optimizer):
    r"""Adam that first averages gradients, then momenta, which stand being compressed to one bit.

    There are two kinds of steps. With :meth:`wants_gradient_sync` every rank has the mean gradient g, and the step is
    that of Adam:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        \theta &\leftarrow \theta - \eta \, \hat m / (\sqrt{\hat v} + \epsilon)

    Without, rank i has its own gradient :math:`g_i`; v stays, and the momenta are averaged through a codec with
    error feedback C, such as :class:`robustdist.comm.MomentumReducer`:

    .. math::
        m \leftarrow \mathrm{mean}_i\, C(\beta_1 m + (1 - \beta_1) g_i), \qquad
        \theta \leftarrow \theta - \eta \, \hat m / (\sqrt{\hat v} + \epsilon)

    :math:`\hat m` is m corrected for the number of its updates, :math:`\hat v` is v corrected for the number of its
    own, so nothing jumps when v is frozen. ``weight_decay`` is added to the gradient, as in Adam. A gradient that is
    missing counts as zero in the second kind of steps, since other ranks may have one.

    With ``variance="onebit"`` the first ``freeze_step`` steps are of the first kind and all others of the second. With
    ``"zero_one"`` the first kind gets rarer: ``kappa`` steps in a row, ``kappa`` times every second step, then every
    fourth, and so on, none from ``freeze_step`` on. The local steps of 0/1 Adam are not part of this optimiser.

    Entries whose variance is zero keep a momentum of zero and stay exactly as they are, although the codec has no zero:
    rows of an embedding that were never used, for example. If such an entry gets a gradient once the variance is frozen
    for good, there is a warning; if all of a parameter were zero, all ranks stop.

    A step with a gradient that is not finite on any rank is skipped on all ranks and leaves no trace.

    Args:
        params: Parameters or parameter groups; with names (as ``named_parameters()`` gives them) messages have those.
        lr: Learning rate :math:`\eta`.
        betas: Decay of the running means :math:`\beta_1, \beta_2`.
        eps: Added to the denominator, positive.
        weight_decay: Coefficient of the decay that is added to the gradient.
        freeze_step: Executed steps after which the variance stays for good; 15 to 25 % of the training.
        variance: "onebit" or "zero_one".
        kappa: Updates of the variance after which their interval doubles; only for "zero_one".
        max_skipped: Steps skipped in a row after which training stops.
        reduce: Averages momenta over the ranks; None for a single process. May be set later.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed".
        Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam".

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> optimizer = OneBitAdam([weight], lr=0.1, freeze_step=1)
        >>> for grad in ([1.0, 0.0], [1.0, 0.0]):
        ...     weight.grad = torch.tensor(grad)
        ...     optimizer.step()
        >>> weight.detach()  # the second entry never had a gradient
        tensor([0.8000, 1.0000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        variance: Literal["onebit", "zero_one"] = "onebit",
        kappa: int = 16,
        max_skipped: int = 50,
        reduce: Reduce | None = None,
    ) -> None:
        if not (0 <= lr < math.inf and 0 <= weight_decay < math.inf):
            raise UsageError(f"lr={lr} and weight_decay={weight_decay} must be finite and not negative")
        if not 0 < eps < math.inf:
            raise UsageError(f"eps={eps} must be positive: an entry without a gradient divides by it")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas={betas} must be two numbers in [0, 1)")
        if variance not in ("onebit", "zero_one"):
            raise UsageError(
                f"variance={variance!r} must be 'onebit' (frozen at once) or 'zero_one' (ever more rarely)"
            )
        self.freeze_step, self.kappa = check_count(freeze_step, "freeze_step"), check_count(kappa, "kappa")
        self.max_skipped = check_count(max_skipped, "max_skipped")
        self.variance, self.reduce = variance, reduce
        self._skipped = 0
        self._masks: dict[Tensor, Tensor | bool] = {}
        self._warned = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "num_steps": 0})

    @property
    def num_steps(self) -> int:
        """Number of executed steps."""
        return int(self.param_groups[0]["num_steps"])

    def wants_gradient_sync(self, step: int | None = None) -> bool:
        """Whether gradients have to be averaged over the ranks in a step, by default the next one.

        In the others every rank needs its own gradient. Averaging it all the same does no harm but to the traffic.

        Args:
            step: Number of executed steps before it.
        """
        step = self.num_steps if step is None else step
        if self.variance == "onebit" or step >= self.freeze_step:
            return step < self.freeze_step
        doublings = (step // self.kappa + 1).bit_length() - 1
        return (step - self.kappa * ((1 << doublings) - 1)) % (1 << doublings) == 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; all ranks must call it together.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Raises:
            UsageError: If a gradient is sparse, if a parameter gets its first gradient when the variance is frozen, or
                if too many steps were skipped in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bad = self._first_bad_gradient()
        executed = self._adam(bad) if self.wants_gradient_sync() else self._one_bit(bad)
        self._skipped = 0 if executed else self._skipped + 1
        if self._skipped >= self.max_skipped:
            raise UsageError(
                f"OneBitAdam skipped {self._skipped} steps in a row after step {self.num_steps}, the last one because "
                f"{'a gradient of another rank' if bad is None else f'the gradient of {bad}'} is not finite: lower lr, "
                "raise freeze_step, or train without float16"
            )
        if executed:
            for group in self.param_groups:
                group["num_steps"] += 1
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they have no variance yet, so they need steps with averaged gradients."""
        if self.param_groups:
            param_group.setdefault("num_steps", self.num_steps)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict()`` returned; residuals are part of the state of ``reduce``."""
        super().load_state_dict(state_dict)
        self._masks, self._skipped = {}, 0

    # --- the two kinds of steps

    def _adam(self, bad: str | None) -> bool:
        if bad is not None:
            return False
        for _, parameter, group in self.named():
            if parameter.grad is None:
                continue
            state, grad = self.state[parameter], _gradient(parameter, group)
            if not state:
                state["step"] = state["variance_step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            beta1, beta2 = group["betas"]
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            state["variance_step"] += 1
            self._move(parameter, state, group)
        self._masks = {}
        return True

    def _one_bit(self, bad: str | None) -> bool:
        """Average momenta and move, unless a rank had a gradient that is not finite."""
        momenta: dict[str, Tensor] = {}
        moved = []
        late: str | None = None
        for name, parameter, group in self.named():
            mask = self._mask(parameter)
            if mask is False:
                if self.num_steps >= self.freeze_step and parameter.grad is not None and bool(parameter.grad.any()):
                    late = late or name
                continue
            momentum: Tensor = self.state[parameter]["exp_avg"]
            grad = _gradient(parameter, group)
            momenta[name] = momentum = momentum.lerp(grad, 1 - group["betas"][0])
            if isinstance(mask, Tensor):
                self._warn_of_late_entries(name, grad, mask)
                momentum.mul_(mask)
            if bad is not None:
                momentum.fill_(math.nan)  # so it comes out on all ranks, and no residual of any of them changes
            moved.append((parameter, group, momentum, mask))
        device = self.param_groups[0]["params"][0].device
        faults = torch.tensor([float(bad is not None), float(late is not None)], device=device)
        if self.reduce is not None:
            self.reduce({**momenta, "faults": faults})
        if faults[1] > 0:
            raise UsageError(
                f"{late or 'a parameter on another rank'} had no gradient until step {self.freeze_step}, when the "
                "variance was frozen, and has one now: raise freeze_step above the first step that uses it"
            )
        if faults[0] > 0 or not _finite(momenta.values()):
            return False
        for parameter, group, momentum, mask in moved:
            state = self.state[parameter]
            state["exp_avg"] = momentum.mul_(mask) if isinstance(mask, Tensor) else momentum
            self._move(parameter, state, group)
        return True

    def _move(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1
        beta1, beta2 = group["betas"]
        root = (1 - beta2 ** state["variance_step"]) ** 0.5
        denominator = (state["exp_avg_sq"].sqrt() / root).add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))

    # --- entries without variance

    def _mask(self, parameter: Tensor) -> Tensor | bool:
        """Return where the variance is not zero; True and False if that is everywhere and nowhere."""
        if parameter not in self._masks:
            known = self.state[parameter]["exp_avg_sq"] != 0 if parameter in self.state else torch.zeros(1)
            count = int(known.count_nonzero())
            self._masks[parameter] = known if 0 < count < known.numel() else count > 0
        return self._masks[parameter]

    def _warn_of_late_entries(self, name: str, grad: Tensor, mask: Tensor) -> None:
        if self._warned or self.num_steps < self.freeze_step:
            return
        count = int(((grad != 0) & ~mask).count_nonzero())
        if count:
            self._warned = True
            warnings.warn(
                f"{count} of {grad.numel()} entries of {name} have their first gradient after step {self.freeze_step}, "
                "when the variance is frozen: they stay as they are; raise freeze_step to train them",
                RobustDistWarning,
                stacklevel=6,
            )

    # --- parameters

    def named(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield the parameters with the names that messages and ``reduce`` get, and their groups."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{place}" for place in range(len(group["params"]))]
            yield from ((name, parameter, group) for name, parameter in zip(names, group["params"], strict=True))

    def _first_bad_gradient(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite."""
        grads = {name: parameter.grad for name, parameter, _ in self.named() if parameter.grad is not None}
        for name, grad in grads.items():
            if grad.is_sparse:
                raise UsageError(
                    f"OneBitAdam does not take the sparse gradient of {name}: create the embedding with sparse=False"
                )
        if _finite(grads.values()):
            return None
        return next(name for name, grad in grads.items() if not _finite([grad]))


def _gradient(parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the gradient with the decay; one that is missing on this rank alone counts as zero."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else grad


def _finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all entries are finite; one value comes back from the device in the usual case."""
    tensors = list(tensors)
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
    if not sums or bool(torch.isfinite(torch.stack(sums).sum())):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)  # a sum may overflow
