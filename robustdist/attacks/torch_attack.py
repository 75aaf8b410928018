"""Attacks of the torchattacks package behind the same contract as ours."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.attacks.losses import LossName
from robustdist.core.guard import frozen_parameters
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.types import AttackLoss, Norm, parse_number

__all__ = ["TorchAttack"]

_NORM_NAMES = {"linf": "Linf", "l2": "L2", "l1": "L1"}
#: Fewest classes that the loss inside these attacks can sort (difference of logits ratio).
_MIN_CLASSES = {"APGDT": 4, "AutoAttack": 4}
_LENGTHS = ("eps", "alpha")


class TorchAttack(Attack):
    """Any class of torchattacks by name, with its side effects shielded.

    torchattacks puts the model in another mode and does not put it back when the attack fails, reseeds the global
    generators, leaves gradients on the weights (CW, FAB, DeepFool, JSMA), needs gradients that Lightning's
    evaluation loops switch off, and assumes images in [0, 1] and ten classes. Here none of that is visible, and
    ``n_classes`` follows the model. Its attacks draw one random stream for the whole batch, so unlike robustdist's
    own they can depend slightly on the batch size.

    Note:
        ``TorchAttack("AutoAttack")`` is torchattacks' preset, which runs far fewer steps than the published AutoAttack
        and reports a higher robust accuracy. Pass ``steps`` to its single attacks instead.

    Args:
        name: Class of torchattacks, for example "APGDT", "CW" or "Square".
        settings: Arguments of that class, for YAML; ``eps`` and ``alpha`` are in pixel units and may be fractions.
        bounds: As in :class:`~robustdist.attacks.base.Attack`.
        mean: As in :class:`~robustdist.attacks.base.Attack`.
        std: As in :class:`~robustdist.attacks.base.Attack`.
        targeted: As in :class:`~robustdist.attacks.base.Attack`.
        seed: As in :class:`~robustdist.attacks.base.Attack`.
        **kwargs: Arguments of that class, for Python.

    Raises:
        UsageError: If torchattacks is missing, has no such class, or the class does not take the arguments.

    Example:
        >>> TorchAttack("APGDT", norm="linf", eps="8/255", steps=20)  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any] | None = None,
        *,
        bounds: tuple[float, float] = (0.0, 1.0),
        mean: float | list[float] | None = None,
        std: float | list[float] | None = None,
        targeted: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        merged = {**(settings or {}), **kwargs}
        self.name = name
        factory = _find(name)
        for option in _LENGTHS:
            if option in merged:
                merged[option] = parse_number(merged[option], option)
        norm = _norm_of(factory, merged)
        if "norm" in merged:
            merged["norm"] = _NORM_NAMES.get(str(merged["norm"]).lower(), merged["norm"])
        accepted = inspect.signature(factory).parameters
        if "model" not in accepted:
            raise UsageError(f"torchattacks.{name} combines other attacks: use one of them, or AutoAttack")
        for option, parameter in accepted.items():
            required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if required and option not in {"model", *merged}:
                raise UsageError(f"torchattacks.{name} needs the argument {option!r}: add it to settings")
        for option in merged:
            if option not in accepted or option == "model":
                known = ", ".join(parameter for parameter in accepted if parameter != "model")
                raise UsageError(f"torchattacks.{name} has no argument {option!r}: it takes {known}")
        defaults = {option: accepted[option].default if option in accepted else 0.0 for option in _LENGTHS}
        if bounds is None:
            raise UsageError("bounds=None does not work here, torchattacks clips to a box: give (smallest, largest)")
        super().__init__(
            norm=norm,
            eps=merged.get("eps", defaults["eps"]),
            step_size=merged.get("alpha", defaults["alpha"]),
            bounds=bounds,
            mean=mean,
            std=std,
            seed=seed,
        )
        if targeted and name == "FAB":
            # it takes images that are not yet in the target class for solved and returns them unchanged
            raise UsageError(_no_targeted_mode(name))
        self.targeted = targeted
        self.torchattacks_settings = merged
        self._accepted = frozenset(accepted)
        self._has_eps = "eps" in accepted

    def run(self, model: nn.Module, x: Tensor, y: Any, *, eps_scale: float = 1.0, **kwargs: Any) -> AttackResult:
        """Attack one batch; arguments as in :meth:`Attack.run`."""
        if eps_scale != 1.0 and not self._has_eps:
            raise UsageError(f"torchattacks.{self.name} has no eps, so eps_schedule has nothing to scale: remove it")
        with frozen_parameters(model):
            return super().run(model, x, y, eps_scale=eps_scale, **kwargs)

    def perturb(self, problem: Problem) -> Tensor:
        """Build the torchattacks object around ``problem`` and run it in the unit range that it assumes."""
        low, high = problem.bounds if problem.bounds is not None else (0.0, 1.0)
        span = high - low
        factory = _find(self.name)
        with torch.no_grad():
            logits = problem.logits(problem.x)
        problem.loss(logits, problem.y)  # checks the targets
        num_classes = logits.shape[1]
        min_classes = _MIN_CLASSES.get(self.name, 3 if self.torchattacks_settings.get("loss") == "dlr" else 2)
        if num_classes < min_classes:
            raise UsageError(
                f"torchattacks.{self.name} needs at least {min_classes} classes, the model has {num_classes}: "
                "use TorchAttack('APGD', loss='ce') or PGD instead"
            )
        settings = dict(self.torchattacks_settings)
        if "eps" in self._accepted:
            settings["eps"] = problem.eps / span
        if "alpha" in self._accepted:
            settings["alpha"] = problem.step_size / span
        if "n_classes" in self._accepted:
            settings.setdefault("n_classes", num_classes)
        if "seed" in self._accepted:
            # the default is one constant (or the clock): every rank and step would draw the same start
            noise = problem.noise
            settings.setdefault("seed", derive_seed(noise.seed, "torchattacks", noise.rank, noise.step) % 2**31)
        attack = factory(_UnitRange(problem, low, span), **settings)
        if self.targeted:
            try:
                attack.set_mode_targeted_by_label(quiet=True)
            except ValueError:
                raise UsageError(_no_targeted_mode(self.name)) from None
        elif self.name == "JSMA":
            # it moves to the next class, counted modulo ten whatever the model
            attack.set_mode_targeted_by_function(lambda _, labels: (labels + 1) % num_classes, quiet=True)
        problem.followed.fill_(True)  # whether it had a gradient to follow cannot be seen from outside
        # in float32 and plain memory order: FAB and JSMA fail on anything else
        images = ((problem.x - low) / span).float().contiguous()
        x_adv: Tensor = attack(images, problem.y).to(problem.x.dtype) * span + low
        return x_adv

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Refuse: the attacks of torchattacks have losses of their own."""
        raise UsageError(
            f"torchattacks.{self.name} has a loss of its own, so attack_loss={attack_loss!r} cannot be used: "
            "remove it, or use PGD"
        )

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values."""
        keep = {"name": self.name, "norm": self.norm, "seed": self.seed, "targeted": self.targeted}
        eps = {"eps": self.eps} if self._has_eps else {}
        return {"attack": "TorchAttack", **self.torchattacks_settings, **keep, **eps}

    def _finish(self, x_adv: Tensor, problem: Problem) -> Tensor:
        if self._has_eps:
            return problem.project(x_adv)
        return x_adv if problem.bounds is None else x_adv.clamp(*problem.bounds)


class _UnitRange(nn.Module):
    """The attacked function on images in [0, 1]; holds no sub-module, so mode changes do not reach the user's."""

    def __init__(self, problem: Problem, low: float, span: float) -> None:
        super().__init__()
        self._problem, self._low, self._span = problem, low, span
        # torchattacks asks the first parameter for the device
        self.device_probe = nn.Parameter(torch.empty(0, device=problem.x.device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._problem.logits(x * self._span + self._low).float()


def _no_targeted_mode(name: str) -> str:
    return f"torchattacks.{name} has no targeted mode: set targeted=False or choose another attack"


def _find(name: str) -> Callable[..., Any]:
    try:
        import torchattacks
        from torchattacks.attack import Attack as Foreign
    except ImportError as error:
        raise UsageError(
            f"TorchAttack({name!r}) needs torchattacks ({error}): pip install 'robustdist[attacks]'"
        ) from error
    found = getattr(torchattacks, name, None)
    if isinstance(found, type) and issubclass(found, Foreign):
        return found
    classes = {
        key.lower(): key
        for key, value in vars(torchattacks).items()
        if isinstance(value, type) and issubclass(value, Foreign)
    }
    close = difflib.get_close_matches(name.lower(), classes, n=1, cutoff=0.4) or sorted(classes)[:1]
    raise UsageError(f"torchattacks has no attack {name!r}: did you mean {classes[close[0]]!r}?")


def _norm_of(factory: Callable[..., Any], settings: Mapping[str, Any]) -> Norm:
    given = settings.get("norm")
    if given is None:
        # every class states it in its docstring, the first one is the default
        match = re.search(r"Distance Measure\s*:\s*(\w+)", inspect.getdoc(factory) or "")
        given = match.group(1) if match else "linf"
    lowered = str(given).lower()
    for norm in ("linf", "l2", "l1"):
        if lowered == norm:
            return norm
    if settings.get("norm") is None:
        return "linf"
    raise UsageError(f"norm={given!r} is unknown: choose one of linf, l2, l1")
