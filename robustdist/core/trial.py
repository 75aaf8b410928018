"""Try ways to run one attack against each other on a real batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.core.folding import disturbed_norms, fixed_norms
from robustdist.core.forward import AttackPrecision, as_logits
from robustdist.core.guard import pure
from robustdist.core.stand_ins import stand_ins

__all__ = [
    "MIN_AGREEMENT",
    "FastPathSettings",
    "Probe",
    "Trial",
    "agreement",
    "choose",
    "combinations",
    "compare",
    "difference",
]

#: Share of the gradient, by magnitude, whose sign a cheaper way must keep.
MIN_AGREEMENT = 0.98
_ROUNDS = 3

# What a change must win to be worth it: more than the noise of a few repetitions.
_MARGIN = 0.05


@dataclass(frozen=True)
class FastPathSettings:
    """One way to run the forward passes of an attack."""

    precision: AttackPrecision = "inherit"
    channels_last: bool = False
    fold_batch_norm: bool = False
    compile: bool = False

    @property
    def num_changes(self) -> int:
        """How many options differ from the plain way."""
        return (self.precision != "inherit") + self.channels_last + self.fold_batch_norm + self.compile

    @property
    def needs_whole_weights(self) -> bool:
        """Whether weights are read outside the forward pass, so that sharded ones will not do."""
        return self.channels_last or self.fold_batch_norm or self.compile

    def compiled(self, value: bool) -> FastPathSettings:
        """Return the same settings with or without compilation."""
        return replace(self, compile=value)

    def __str__(self) -> str:
        words: list[str] = [] if self.precision == "inherit" else [f"precision {self.precision}"]
        words += [name for name in ("channels_last", "fold_batch_norm", "compile") if getattr(self, name)]
        return " + ".join(words) or "plain"


@dataclass(frozen=True)
class Trial:
    """What was measured of one way.

    Attributes:
        settings: The way.
        seconds: Shortest time of a forward pass and an input gradient.
        agreement: Share of the plain gradient, by magnitude, whose sign is kept.
    """

    settings: FastPathSettings
    seconds: float
    agreement: float

    def __str__(self) -> str:
        return f"{self.settings} {1000 * self.seconds:.3g} ms ({self.agreement:.1%})"


#: Context in which the forward passes run in a given way.
_Applied: TypeAlias = Callable[[FastPathSettings], AbstractContextManager[None]]


class Probe:
    """One batch on which an attack would work; every call leaves the module as it was.

    Args:
        module: The module under attack.
        x: Inputs.
        forward: Maps inputs to logits.
        loss: Maps logits to the scalar that the attack differentiates; None for cross-entropy of the predictions.
        mode: Mode of ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        x: Tensor,
        forward: Callable[[Tensor], Any],
        loss: Callable[[Tensor], Tensor] | None,
        mode: Literal["eval", "train"],
    ) -> None:
        self.module = module
        self.mode: Literal["eval", "train"] = mode
        self._forward = forward
        self._loss = _loss_of_predictions if loss is None else loss
        with torch.inference_mode(False):
            self._x = x.detach().clone()

    @contextmanager
    def entered(self) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that runs the forward pass, in the state in which an attack would run it."""
        with pure(self.module, self.mode, self._x.device, seed=0):
            yield lambda: as_logits(self._forward(self._x))

    def logits(self) -> Tensor:
        """Return the logits, without a graph."""
        with self.entered() as run, torch.no_grad():
            return run()

    def gradient(self) -> Tensor:
        """Return the gradient of the loss in the inputs; entries that are not finite are zero."""
        return torch.nan_to_num(self._timed()[0], nan=0.0, posinf=0.0, neginf=0.0)

    def seconds(self) -> float:
        """Return how long a forward pass and an input gradient take."""
        return self._timed()[1]

    def _timed(self) -> tuple[Tensor, float]:
        with pure(self.module, self.mode, self._x.device, seed=0):
            x = self._x.clone().requires_grad_()
            start = self._clock()
            (grad,) = torch.autograd.grad(self._loss(as_logits(self._forward(x))), x)
            return grad, self._clock() - start

    def _clock(self) -> float:
        device = self._x.device
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        # with one thread processor time is all there is, and other programs disturb it less
        return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def combinations(
    precision: Sequence[AttackPrecision], channels_last: Sequence[bool], fold_batch_norm: Sequence[bool]
) -> list[FastPathSettings]:
    """Return all ways that the values allow, those with the fewest changes first."""
    ways = [FastPathSettings(*values) for values in product(precision, channels_last, fold_batch_norm)]
    return sorted(ways, key=lambda way: way.num_changes)


def fold_error(probe: Probe, applied: _Applied) -> float:
    """Return what folding batch norm changes in the logits: the largest difference over the largest logit, or NaN.

    Once with the norms as they are and once with norms far from the identity, which a new norm is.
    """
    norms = [norm for _, norm in fixed_norms(probe.module, probe.mode)]
    errors = []
    for disturbance in ({}, disturbed_norms(norms, seed=0)):
        logits = []
        for fold in (False, True):
            with stand_ins(disturbance), applied(FastPathSettings(precision="32", fold_batch_norm=fold)):
                logits.append(probe.logits())
        errors.append(difference(*logits))
    return max(errors, key=lambda error: (math.isnan(error), error))


def compare(
    probe: Probe,
    ways: Sequence[FastPathSettings],
    applied: _Applied,
) -> tuple[list[Trial], list[str]]:
    """Measure ``ways``, the first of which is the reference of the others, in turn and several times.

    Returns:
        The trials of the ways that work and keep the signs of the gradient, and a sentence on each other one.
    """
    notes: list[str] = []
    agreements: dict[FastPathSettings, float] = {}
    reference: Tensor | None = None
    for way in ways:
        try:
            with applied(way):
                grad = probe.gradient()
        except RuntimeError as error:  # a view() in the user's forward, say, that does not go with channels_last
            if reference is None:
                raise
            notes.append(f"{way} is left out: {str(error).strip().partition(chr(10))[0]}")
            continue
        reference = grad if reference is None else reference
        kept = agreement(reference, grad)
        if kept >= MIN_AGREEMENT:
            agreements[way] = kept
        else:
            notes.append(f"{way} is left out: it keeps the sign of {kept:.1%} of the gradient")
    seconds = dict.fromkeys(agreements, math.inf)
    for way in [*agreements] * _ROUNDS:
        with applied(way):
            seconds[way] = min(seconds[way], probe.seconds())
    return [Trial(way, seconds[way], kept) for way, kept in agreements.items()], notes


def choose(trials: Sequence[Trial]) -> FastPathSettings:
    """Return the fastest way, where each must be more than 5 % faster than the best of those before it.

    Example:
        >>> plain, folded = FastPathSettings(), FastPathSettings(fold_batch_norm=True)
        >>> choose([Trial(plain, 1.00, 1.0), Trial(folded, 0.96, 1.0)]) == plain
        True
    """
    best = trials[0]
    for trial in trials[1:]:
        if trial.seconds < (1 - _MARGIN) * best.seconds:
            best = trial
    return best.settings


def agreement(reference: Tensor, grad: Tensor) -> float:
    r"""Return the share of the gradient ``reference``, by magnitude, whose sign ``grad`` keeps.

    .. math:: a = \sum_i |g_i| \, [\operatorname{sign} g_i = \operatorname{sign} g'_i] \, / \sum_i |g_i|

    A linf step along the other signs keeps :math:`2 a - 1` of the first-order gain at agreement :math:`a`. Entries
    are weighted because those next to zero lose their sign at any rounding and gain nothing either way.
    """
    weights = reference.abs().double()
    total = float(weights.sum())
    return float(weights[reference.sign() == grad.sign()].sum()) / total if total > 0 else 1.0


def difference(reference: Tensor, logits: Tensor) -> float:
    """Return the largest difference over the largest entry of ``reference``."""
    return float((logits.double() - reference.double()).abs().max() / reference.double().abs().max().clamp(min=1e-30))


def _loss_of_predictions(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, logits.detach().argmax(1), reduction="sum")
