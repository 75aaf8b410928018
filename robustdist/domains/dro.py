"""Domain ratios by distributionally robust optimisation: the worst mix within a distance of the usual one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from robustdist.errors import UsageError

__all__ = ["WorstMix", "excess_losses", "floored", "next_potential", "normalised", "worst_mix"]

_BISECTIONS = 200


class WorstMix(NamedTuple):
    """Outcome of :func:`worst_mix`.

    Attributes:
        eta: Threshold on the excess loss; the largest excess where the ball cannot be reached.
        ratios: Share of every domain, shape (domains,), sum 1.
    """

    eta: float
    ratios: Tensor


def normalised(values: Sequence[float] | Tensor, option: str = "ratios") -> Tensor:
    """Return positive ``values`` as float64 of sum 1, shape (domains,).

    Raises:
        UsageError: If there is no value, or one is not positive and finite.
    """
    shares = torch.as_tensor(values, dtype=torch.float64)
    if shares.dim() != 1 or not len(shares) or not bool((shares.isfinite() & (shares > 0)).all()):
        raise UsageError(f"{option}={shares.tolist()} must be a list of positive numbers, one per domain")
    return shares / shares.sum()


def excess_losses(losses: Tensor, reference: Tensor) -> Tensor:
    r"""Return :math:`e_d = L_d - s R_d` with the largest s of 1, 0.9, ..., 0 that leaves some :math:`e_d \ge 0`.

    A reference above every loss says nothing about which domain lags behind; scaled down it does.

    Args:
        losses: Loss of every domain, shape (domains,).
        reference: Loss that every domain should reach, shape (domains,).
    """
    for tenths in range(10, -1, -1):
        excess = losses - reference * (tenths / 10)
        if excess.max() >= 0:
            break
    return excess


def worst_mix(excess: Tensor, potential: Tensor, *, rho: float = 0.1, min_ratio: float = 0.2) -> WorstMix:
    r"""Return the mix of domains on the chi-square ball around ``potential`` that weighs the excess losses most.

    .. math::
        q_d(\eta) = \frac{p_d\, c_d}{\sum_k p_k c_k}, \quad
        c_d = \max\Big(\frac{(e_d - \eta)_+}{\sum_k p_k (e_k - \eta)_+},\, c_{min}\Big), \quad
        \tfrac12 \sum_d p_d \Big(\frac{q_d}{p_d} - 1\Big)^2 = \rho

    The threshold :math:`\eta` is found by bisection in float64. If no threshold reaches the radius, as with equal
    excess losses or where the worst domain has nearly everything already, the mix is the potential one.

    Args:
        excess: Excess loss :math:`e_d`, finite, shape (domains,).
        potential: Reference mix :math:`p_d`, positive, sum 1, shape (domains,).
        rho: Radius of the ball, above 0.
        min_ratio: Smallest :math:`c_{min}` of a ratio to its reference before normalisation, in [0, 1).

    Raises:
        UsageError: If an argument is out of range.

    References:
        Deng et al., "DRPruning: Efficient Large Language Model Pruning through Distributionally Robust Optimization".

    Example:
        >>> worst_mix(torch.tensor([0.5, 0.1, 1.0]), torch.tensor([0.5, 0.3, 0.2])).ratios
        tensor([0.5143, 0.1368, 0.3489], dtype=torch.float64)
    """
    check_ball(rho, min_ratio)
    e, p = excess.to(torch.float64), potential.to(torch.float64)
    high = float(e.max())
    spread = high - float(e.min())
    if spread <= 1e-12 * max(1.0, abs(high)):
        return WorstMix(high, p.clone())

    def mix(eta: float) -> Tensor:
        above = (e - eta).relu()
        weights = p * (above / (p * above).sum()).clamp(min=min_ratio)
        return weights / weights.sum()

    def distance(eta: float) -> float:
        return float(0.5 * (p * (mix(eta) / p - 1) ** 2).sum())

    length = max(high / (math.sqrt(2 * rho + 1) - 1) + high, spread)
    while distance(high - length) > rho:
        length *= 2
    low, top = high - length, high
    for _ in range(_BISECTIONS):
        middle = (low + top) / 2
        if not low < middle < high:
            break
        low, top = (middle, top) if distance(middle) <= rho else (low, middle)
    if top == high:
        return WorstMix(high, p.clone())
    return WorstMix(low, mix(low))


def check_ball(rho: float, min_ratio: float) -> None:
    """Refuse a radius or a floor out of range.

    Raises:
        UsageError: If ``rho`` is not above 0 or ``min_ratio`` not in [0, 1).
    """
    if not 0 < rho < math.inf:
        raise UsageError(f"rho={rho} must be a number above 0; take method='constant' for ratios that do not change")
    if not 0 <= min_ratio < 1:
        raise UsageError(f"min_ratio={min_ratio} must be at least 0 and below 1")


def floored(ratios: Tensor, floor: float) -> Tensor:
    r"""Return :math:`\max(q_d, f)`, normalised, so that no domain is ever left without samples.

    Args:
        ratios: Mix :math:`q_d`, shape (domains,).
        floor: Smallest ratio f before normalisation; after it the smallest is :math:`f / \sum_d \max(q_d, f)` or more.
    """
    raised = ratios.clamp(min=floor)
    return raised / raised.sum()


def next_potential(potential: Tensor, ratios: Tensor, initial: Tensor, *, decay: float = 0.9) -> Tensor:
    r"""Move the reference mix a little towards the sampled one, in bounds that it never leaves.

    .. math::
        p_d \leftarrow \mathrm{clip}\big(s\,(\gamma p_d + (1 - \gamma) q_d),\; \max(p^0_d/2, \min_k p^0_k),\;
        \min(2 p^0_d, \max_k p^0_k)\big)

    with the one scale s for which the sum is 1: clipping and then dividing by the sum would leave the bounds again.

    Args:
        potential: Present reference mix :math:`p_d`, shape (domains,), sum 1.
        ratios: Sampled mix :math:`q_d`, likewise.
        initial: Mix of the user's data :math:`p^0_d`, likewise.
        decay: Share :math:`\gamma` of the present mix, in [0, 1].

    Example:
        >>> even = torch.tensor([0.5, 0.5])
        >>> next_potential(even, torch.tensor([0.9, 0.1]), torch.tensor([0.6, 0.4]), decay=0.9)
        tensor([0.5400, 0.4600])
    """
    wanted = decay * potential + (1 - decay) * ratios
    least = torch.maximum(initial / 2, initial.min())
    most = torch.minimum(2 * initial, initial.max())
    low, high = 0.0, float((most / wanted).max())
    for _ in range(_BISECTIONS):
        scale = (low + high) / 2
        if not low < scale < high:
            break
        low, high = (scale, high) if float((wanted * scale).clamp(least, most).sum()) < 1 else (low, scale)
    return (wanted * high).clamp(least, most)
