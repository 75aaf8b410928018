"""Domain ratios by multiplicative weights, the baseline that has no ball and no reference mix."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["multiplicative_ratios"]


def multiplicative_ratios(ratios: Tensor, excess: Tensor, *, step_size: float = 1.0, smoothing: float = 1e-4) -> Tensor:
    r"""Return the ratios after one step of multiplicative weights.

    .. math:: w_d \leftarrow (1 - c)\, \mathrm{softmax}_d(\log w_d + \eta (L_d - R_d)) + c / K

    Nothing holds the ratios near the user's mix: one domain can take over nearly all of it.

    Args:
        ratios: Present ratios :math:`w_d`, positive, sum 1, shape (K,).
        excess: :math:`L_d - R_d`, finite, shape (K,).
        step_size: :math:`\eta`, at least 0.
        smoothing: Share c of the uniform mix.

    References:
        Xia et al., "Sheared LLaMA: Accelerating Language Model Pre-training via Structured Pruning".

    Example:
        >>> multiplicative_ratios(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
        tensor([0.2690, 0.7310])
    """
    moved = torch.softmax(ratios.log() + step_size * excess, dim=0)
    return (1 - smoothing) * moved + smoothing / len(ratios)
