"""What loss a domain will have at the end of training, from a scaling law through the losses so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ScalingLaw", "fit_scaling_laws", "predicted_loss"]

_HUBER_DELTA = 1e-3
#: Slopes that are tried, and how many of the best become starts.
_SLOPES = torch.logspace(math.log10(0.02), math.log10(4.0), 24, dtype=torch.float64)
_NUM_STARTS = 3
#: First a smooth error, then that of the kinks, where L-BFGS would get stuck on its way.
_DELTAS = (0.1, _HUBER_DELTA)
_MOST_STEPS = 5


class ScalingLaw(NamedTuple):
    r"""The curve :math:`L(D) = e^{a - \alpha \log D} + e^E` and how well it fits.

    Attributes:
        a, alpha, e: Its parameters.
        error: Mean Huber loss over the points.
    """

    a: float
    alpha: float
    e: float
    error: float

    def __call__(self, samples: float) -> float:
        """Return the loss after ``samples`` samples, above 0."""
        try:
            return math.exp(self.a - self.alpha * math.log(samples)) + math.exp(self.e)
        except OverflowError:
            return math.inf


def fit_scaling_laws(samples: Sequence[float], losses: Sequence[float]) -> list[ScalingLaw]:
    r"""Fit :math:`L = e^{a - \alpha \log D} + e^E` by L-BFGS from three starts and return the fits, best first.

    The error is the mean Huber loss with :math:`\delta = 10^{-3}`, which hardly hears a single noisy evaluation. The
    starts are the best of a grid of slopes :math:`\alpha`, where :math:`e^a` and :math:`e^E` have closed form by least
    squares. Fits that are not finite are left out, so the list may be shorter. No random numbers are drawn.

    Args:
        samples: Samples :math:`D` seen at each point, above 0.
        losses: Loss :math:`L` at each point, finite.

    References:
        Deng et al., "DRPruning: Efficient Large Language Model Pruning through Distributionally Robust Optimization".
    """
    # training may have been validated in inference mode, whose tensors no gradient can go through
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.tensor(samples, dtype=torch.float64).log()
        y = torch.tensor(losses, dtype=torch.float64)
        # around the mean of log D the height of the curve and its slope can be moved one at a time
        centre = x.mean()
        fits = [_descend(x - centre, y, start) for start in _starts(x - centre, y)]
    laws = [ScalingLaw(height + alpha * float(centre), alpha, e, error) for height, alpha, e, error in fits]
    return sorted((law for law in laws if all(map(math.isfinite, law))), key=lambda law: law.error)


def predicted_loss(samples: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Return the loss expected after ``target`` samples: the mean over the fits, each in [0, smallest loss seen].

    Args:
        samples: As for :func:`fit_scaling_laws`.
        losses: As for :func:`fit_scaling_laws`.
        target: Samples at the end of training, above 0.

    Returns:
        The loss, or None if no fit is finite.
    """
    laws = fit_scaling_laws(samples, losses)
    if not laws:
        return None
    smallest = min(losses)
    return sum(min(law(target), smallest) for law in laws) / len(laws)


def _starts(x: Tensor, y: Tensor) -> list[list[float]]:
    """Return log height, slope and log floor for the slopes of the least error."""
    curves = (-_SLOPES[:, None] * x).exp()
    means = curves.mean(1)
    spread = ((curves - means[:, None]) ** 2).mean(1).clamp(min=1e-30)
    # both terms are positive whatever the points are
    least = 1e-6 + 1e-3 * float(y.abs().mean())
    heights = (((curves - means[:, None]) * (y - y.mean())).mean(1) / spread).clamp(min=least)
    floors = (y.mean() - heights * means).clamp(min=least)
    errors = (heights[:, None] * curves + floors[:, None] - y).abs().mean(1)
    best = errors.argsort(stable=True)[:_NUM_STARTS]
    return torch.stack([heights.log(), _SLOPES, floors.log()], dim=1)[best].tolist()


def _descend(x: Tensor, y: Tensor, start: list[float]) -> tuple[float, float, float, float]:
    """Return log height, slope, log floor and error where up to five times 20 iterations per delta end."""
    height, alpha, e = parameters = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in start]

    def error(delta: float) -> Tensor:
        return F.huber_loss((height - alpha * x).exp() + e.exp(), y, delta=delta)

    for delta in _DELTAS:
        optimizer = torch.optim.LBFGS(
            parameters, max_iter=20, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def closure(delta: float = delta, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = error(delta) / delta
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        last = math.inf
        for _ in range(_MOST_STEPS):
            now = float(optimizer.step(closure).detach())  # type: ignore[no-untyped-call]
            if not now < last * (1 - 1e-3):
                break
            last = now
    with torch.no_grad():
        return float(height), float(alpha), float(e), float(error(_HUBER_DELTA))
