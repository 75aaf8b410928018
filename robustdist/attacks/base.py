"""What all attacks share: arguments, pixel units, purity, precision. An attack writes ``perturb`` and nothing else."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from robustdist.attacks.functional import distance
from robustdist.attacks.losses import LOSSES, LossName, check_class_indices, checked_loss
from robustdist.attacks.problem import AttackResult, Problem
from robustdist.core.forward import as_logits
from robustdist.core.guard import ordinary_tensors, pure
from robustdist.core.rng import Noise, derive_seed
from robustdist.errors import UsageError
from robustdist.types import NORMS, AttackLoss, Bounds, Norm, Number, parse_number

__all__ = ["Attack", "AttackResult", "Problem"]

# Room for the rounding of a normalise/denormalise round trip when the range of a batch is checked; half precision
# needs more, see check_inputs.
_BOUNDS_TOLERANCE = 1e-4
_HALF = (torch.float16, torch.bfloat16)


class Attack(ABC):
    """Base of all attacks: ``x_adv = attack(model, x, y)``.

    ``model`` maps inputs to logits of shape (batch, classes). ``x`` is not changed. The model's modes, buffers,
    gradients and ``requires_grad`` flags and all global random states are afterwards as before, also when the model
    raises.

    Args:
        norm: Norm of the ball, "linf", "l2" or "l1".
        eps: Radius in pixel units, a number or a fraction such as "8/255".
        step_size: Length of one step in pixel units, in ``norm``.
        targeted: If True, ``y`` holds the classes to reach and the loss is decreased.
        bounds: Smallest and largest valid pixel; None for inputs without a box.
        mean: Per-channel mean when ``x`` arrives normalised; ``eps``, ``step_size`` and ``bounds`` stay in pixels.
        std: Per-channel standard deviation when ``x`` arrives normalised.
        attack_loss: "ce" (cross-entropy), "margin" (largest other logit minus own), "dlr" (difference of logits
            ratio), or a function of (logits, y).
        model_mode: "eval", or "train" to attack the model as the training step sees it.
        seed: Seed of all random draws.

    Raises:
        UsageError: If an argument is out of range.
    """

    #: Whether ``targeted=True`` means anything to this attack.
    supports_targeted = True
    #: Names of the attacks that this one is made of; empty for a single attack.
    stages: Sequence[str] = ()
    #: Whether it follows input gradients, so that images without one say something.
    uses_gradient = True
    # Whether eps limits the result; attacks that search for the smallest perturbation have no radius.
    _has_eps = True

    def __init__(
        self,
        *,
        norm: Norm = "linf",
        eps: Number = "8/255",
        step_size: Number = "2/255",
        targeted: bool = False,
        bounds: Bounds = (0.0, 1.0),
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        attack_loss: LossName | AttackLoss = "ce",
        model_mode: Literal["eval", "train"] = "eval",
        seed: int = 0,
    ) -> None:
        if norm not in NORMS:
            raise UsageError(f"norm={norm!r} is unknown: choose one of {', '.join(NORMS)}")
        if bounds is not None and not (
            isinstance(bounds, (tuple, list)) and len(bounds) == 2 and bounds[0] < bounds[1]
        ):
            raise UsageError(f"bounds={bounds!r} must be (smallest, largest) pixel value, for example (0.0, 1.0)")
        self.norm: Norm = norm
        self.eps = parse_number(eps, "eps")
        self.step_size = parse_number(step_size, "step_size")
        for option, value in (("eps", self.eps), ("step_size", self.step_size)):
            if not 0 <= value < math.inf:
                raise UsageError(f"{option}={value} must be a finite number that is not negative")
        if bounds is not None and norm == "linf" and self.eps > bounds[1] - bounds[0]:
            raise UsageError(
                f"eps={self.eps:g} is larger than the whole pixel range {tuple(bounds)}: "
                f"give it in the units of bounds, for example eps={self.eps:g}/255, or set bounds=(0, 255)"
            )
        if (mean is None) != (std is None):
            raise UsageError("mean and std belong together: give both, or neither for inputs in pixel units")
        if std is not None and not bool((torch.as_tensor(std) > 0).all()):
            raise UsageError(f"std={std!r} must be positive: give the values that the inputs were divided by")
        if targeted and not self.supports_targeted:
            raise UsageError(f"{type(self).__name__} has no targeted mode: set targeted=False or choose another attack")
        if model_mode not in ("eval", "train"):
            raise UsageError(f"model_mode={model_mode!r} is unknown: choose eval or train")
        self.bounds: Bounds = None if bounds is None else (float(bounds[0]), float(bounds[1]))
        self.mean = mean
        self.std = std
        self.targeted = targeted
        self.attack_loss = checked_loss(attack_loss)
        self.model_mode: Literal["eval", "train"] = model_mode
        self.seed = seed

    @abstractmethod
    def perturb(self, problem: Problem) -> Tensor:
        """Return adversarial inputs for ``problem``, in its units; the base class projects them once more.

        An attack that never calls ``problem.gradient`` sets ``problem.followed`` to True where it had something to go
        by; otherwise its samples are reported as attacked blindly.
        """

    def __call__(self, model: nn.Module, x: Tensor, y: Any, **kwargs: Any) -> Tensor:
        """Return adversarial inputs; shapes and keyword arguments as in ``run``."""
        return self.run(model, x, y, **kwargs).x_adv

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Any,
        *,
        forward: Callable[[Tensor], Any] | None = None,
        rank: int = 0,
        step: int = 0,
        sample_ids: Sequence[int] | None = None,
        eps_scale: float = 1.0,
        step_scale: float = 1.0,
        loss_scale: float = 1.0,
        rowwise: bool = True,
    ) -> AttackResult:
        """Attack one batch.

        Args:
            model: The module that is left as it was; also the function attacked unless ``forward`` is given.
            x: Inputs, shape (batch, ...), floating point, within ``bounds`` (after undoing ``mean`` and ``std``).
            y: Class indices of shape (batch,), or whatever a custom ``attack_loss`` takes.
            forward: Maps inputs to logits; default ``model``.
            rank: Global rank, part of the random key.
            step: Number of this call in the run, part of the random key.
            sample_ids: One integer per row; then draws depend on (seed, id) instead of (seed, rank, step).
            eps_scale: Factor on ``eps`` for this call, as schedules use it.
            step_scale: Factor on ``step_size`` for this call.
            loss_scale: Factor on the loss, against underflow in half precision.
            rowwise: Whether ``forward`` maps every row for itself; False keeps the batch together.

        Raises:
            UsageError: If ``x`` is not floating point or leaves ``bounds``, or ``y`` does not fit ``attack_loss``.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model is a {type(model).__name__}: pass the module, and a function of the input as forward="
            )
        if not x.is_floating_point():
            raise UsageError(f"the input has dtype {x.dtype}: attacks need floating-point inputs, convert them first")
        if sample_ids is not None and len(sample_ids) != len(x):
            raise UsageError(f"sample_ids has {len(sample_ids)} entries for {len(x)} inputs: give one per row, or None")
        noise = Noise(self.seed, rank, step, sample_ids)
        with pure(model, self.model_mode, x.device, derive_seed(self.seed, "model", rank, step)):
            # clone: a tensor made in inference mode cannot take part in autograd
            x_input = x.detach().clone()
            problem = self.problem(
                model if forward is None else forward,
                x_input,
                ordinary_tensors(y),
                noise,
                eps_scale=eps_scale,
                step_scale=step_scale,
                loss_scale=loss_scale,
                rowwise=rowwise,
            )
            if (self._has_eps and problem.eps == 0) or len(x) == 0:
                nothing = torch.zeros(len(x), dtype=torch.bool, device=x.device)
                return AttackResult(x_input, nothing, nothing.long() - 1 if self.stages else None)
            x_adv = self._finish(self.perturb(problem).detach(), problem)
            return AttackResult(self._to_input(x_adv, problem.x, x_input), ~problem.followed, problem.stage)

    def problem(
        self,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Any,
        noise: Noise,
        *,
        eps_scale: float = 1.0,
        step_scale: float = 1.0,
        loss_scale: float = 1.0,
        rowwise: bool = True,
    ) -> Problem:
        """Return one attack call in pixel units; arguments as in :meth:`run`.

        Raises:
            UsageError: If ``x`` leaves ``bounds``.
        """
        pixels = self.check_inputs(x)
        return Problem(
            x=pixels,
            y=y,
            logits=self._pixel_logits(forward, x, pixels),
            loss=self._loss(),
            norm=self.norm,
            eps=self.eps * eps_scale,
            step_size=self.step_size * step_scale,
            bounds=self.bounds,
            noise=noise,
            loss_scale=loss_scale,
            targeted=self.targeted,
            # in train mode batch statistics tie the rows together
            rowwise=rowwise and self.model_mode == "eval",
            whole_eps=self.eps,
            step_scale=step_scale,
            rounded=self._rounded(x.dtype),
        )

    def adapt(self, problem: Problem, noise: Noise) -> Problem:
        """Return another attack's ``problem`` with this attack's loss and step size, for use as a stage of it."""
        scale = problem.eps / self.eps if self.eps else 1.0
        return replace(problem, loss=self._loss(), step_size=self.step_size * scale, noise=noise)

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Return a copy of the attack that increases another loss.

        Raises:
            UsageError: If the loss is unknown, or the attack has a loss of its own.
        """
        changed = copy.copy(self)
        changed.attack_loss = checked_loss(attack_loss)
        return changed

    def variant(self, **changes: Any) -> Attack:
        """Return a copy with other values of existing attributes, as objectives make their own inner problem."""
        changed = copy.copy(self)
        for name, value in changes.items():
            if not hasattr(self, name):
                raise UsageError(f"{type(self).__name__} has no {name}, which this objective needs to set: use PGD")
            setattr(changed, name, value)
        return changed

    def distance(self, x_adv: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return how far every row of ``x_adv`` is from its row of ``x``, in the units of ``eps``, shape (batch,).

        ``mask`` says which tokens of a sequence are real, for attacks that make a difference.
        """
        return distance(self.to_pixels(x_adv), self.to_pixels(x), self.norm)

    @property
    def radius(self) -> float | None:
        """``eps``, or None for an attack that looks for the smallest perturbation."""
        return self.eps if self._has_eps else None

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values, for reports and logs."""
        plain = (str, int, float, bool, type(None))
        settings: dict[str, Any] = {"attack": type(self).__name__}
        for name, value in vars(self).items():
            if isinstance(value, plain):
                settings[name] = value
            elif isinstance(value, Sequence):
                settings[name] = list(value)
            elif callable(value):
                settings[name] = getattr(value, "__qualname__", type(value).__name__)
        return settings

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings().items() if name != "attack")
        return f"{type(self).__name__}({arguments})"

    def _finish(self, x_adv: Tensor, problem: Problem) -> Tensor:
        # a point that the attack has judged must not be moved by a rounding error
        return problem.settle(x_adv)

    def _loss(self) -> Callable[[Tensor, Any], Tensor]:
        builtin = isinstance(self.attack_loss, str)
        loss = LOSSES[self.attack_loss] if isinstance(self.attack_loss, str) else self.attack_loss
        unchecked = builtin

        def signed(logits: Tensor, y: Any) -> Tensor:
            nonlocal unchecked
            if unchecked:  # once per call: the checks read values back from the device
                check_class_indices(logits, y)
                unchecked = False
            value = loss(logits, y)
            return -value if self.targeted else value

        return signed

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.mean is None or self.std is None:
            return None
        shape = [-1] + [1] * max(0, like.dim() - 2)
        mean, std = (torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in (self.mean, self.std))
        for name, value in (("mean", mean), ("std", std)):
            if value.numel() not in (1, like.shape[1]):
                raise UsageError(
                    f"{name} has {value.numel()} entries, the input has {like.shape[1]} channels: give one per channel"
                )
        return mean.view(shape), std.view(shape)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Return ``x`` in pixel units, at least float32."""
        pixels = x.to(torch.promote_types(x.dtype, torch.float32))
        statistics = self._statistics(pixels)
        return pixels if statistics is None else pixels * statistics[1] + statistics[0]

    def _pixel_logits(self, forward: Callable[[Tensor], Any], x: Tensor, pixels: Tensor) -> Callable[[Tensor], Tensor]:
        dtype, statistics = x.dtype, self._statistics(pixels)

        def logits(pixels: Tensor) -> Tensor:
            given = _from_pixels(pixels, statistics).to(dtype)
            # a forward that writes into its input must not move the attack's own point
            output = as_logits(forward(given.clone() if given is pixels else given))
            return output.to(torch.promote_types(output.dtype, torch.float32))

        return logits

    def check_inputs(self, x: Tensor) -> Tensor:
        """Return ``x`` in pixel units if it fits the attack.

        Raises:
            UsageError: If the images leave ``bounds`` or the radius exceeds the image box.
        """
        pixels = self.to_pixels(x)
        if pixels.numel() == 0 or self.bounds is None:
            return pixels
        low, high = (float(value) for value in torch.aminmax(pixels.detach()))
        span = self.bounds[1] - self.bounds[0]
        # a white pixel normalised in bfloat16 comes back as 1.002
        slack = max(_BOUNDS_TOLERANCE, torch.finfo(x.dtype).eps) * span
        if not (low >= self.bounds[0] - slack and high <= self.bounds[1] + slack):
            remedy = (
                "scale them, set bounds, or give mean and std if they are normalised"
                if self.mean is None
                else f"mean={self.mean} and std={self.std} do not undo what the loader did, correct them"
            )
            raise UsageError(f"the images span [{low:.4g}, {high:.4g}] but bounds={tuple(self.bounds)}: {remedy}")
        size = pixels[0].numel()
        diameter = span * {"linf": 1.0, "l2": size**0.5, "l1": float(size)}[self.norm]
        if self.eps > diameter:
            raise UsageError(f"eps={self.eps:g} exceeds the {self.norm} diameter {diameter:g} of the images: reduce it")
        return pixels

    def from_pixels(self, pixels: Tensor, like: Tensor) -> Tensor:
        """Return ``pixels`` in the units and dtype of the inputs ``like``, differentiably."""
        return _from_pixels(pixels, self._statistics(pixels)).to(like.dtype)

    def _rounded(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor] | None:
        if dtype not in _HALF:
            return None

        def rounded(x_adv: Tensor, pixels: Tensor) -> Tensor:
            x = _from_pixels(pixels, self._statistics(pixels)).to(dtype)
            return self.to_pixels(self._to_input(x_adv, pixels, x))

        return rounded

    def _to_input(self, x_adv: Tensor, pixels: Tensor, x: Tensor) -> Tensor:
        result = _from_pixels(x_adv, self._statistics(pixels)).to(x.dtype)
        if x.dtype in _HALF and self._has_eps:
            # rounding to half precision may step over the radius: where it went away from x, take the number before
            outwards = (self.to_pixels(result) - pixels).abs() > (x_adv - pixels).abs()
            result = torch.where(outwards, torch.nextafter(result, x), result)
        return torch.empty_like(x).copy_(result)


def _from_pixels(pixels: Tensor, statistics: tuple[Tensor, Tensor] | None) -> Tensor:
    return pixels if statistics is None else (pixels - statistics[0]) / statistics[1]
