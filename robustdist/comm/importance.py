"""Which samples of a batch are worth sending, and how often a received one counts."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError

__all__ = ["SCORES", "Score", "importance", "inclusion_probabilities", "repeats", "systematic_draw", "top_rows"]

Score: TypeAlias = Literal["loss", "gradient"]
SCORES: tuple[Score, ...] = ("loss", "gradient")


def importance(logits: Tensor, y: Tensor, score: Score) -> Tensor:
    r"""Return the importance of every sample: its cross-entropy, or :math:`\|\mathrm{softmax}(z) - e_y\|_2`.

    The latter is the gradient of the cross-entropy with respect to the logits.

    Args:
        logits: Shape (batch, classes).
        y: Class indices, shape (batch,).
        score: "loss" or "gradient".

    Returns:
        Shape (batch,), float32, on the CPU.

    Raises:
        UsageError: If ``y`` does not hold one class index per row.
    """
    if logits.dim() != 2 or y.shape != logits.shape[:1] or y.is_floating_point():
        raise UsageError(
            f"score={score!r} needs one class index per sample, but logits of shape {tuple(logits.shape)} meet a "
            f"target of shape {tuple(y.shape)} and type {y.dtype}: use select='all'"
        )
    logits = logits.float()
    if score == "loss":
        return F.cross_entropy(logits, y, reduction="none").cpu()
    error = logits.softmax(1)
    error[torch.arange(len(y), device=y.device), y] -= 1
    norms: Tensor = torch.linalg.vector_norm(error, dim=1)
    return norms.cpu()


def top_rows(scores: Tensor, count: int) -> Tensor:
    """Return the numbers of the ``count`` samples with the highest scores, in the order of the batch.

    Example:
        >>> top_rows(torch.tensor([0.1, 3.0, 0.2, 2.0]), 2)
        tensor([1, 3])
    """
    # a score that is not a number ranks highest: such a sample should be seen
    return torch.topk(scores.nan_to_num(nan=torch.inf), count).indices.sort().values


def inclusion_probabilities(scores: Tensor, count: int) -> Tensor:
    r"""Return :math:`p_i = \min(1, c\,(s_i + \bar s))` with c such that they sum to ``count``.

    The mean :math:`\bar s` keeps every p above count / (2 batch), so that no weight 1/p is more than twice that of a
    uniform draw.

    Args:
        scores: Shape (batch,), not negative.
        count: Samples to be sent, at most the batch.

    Returns:
        Shape (batch,), float64.

    Example:
        >>> inclusion_probabilities(torch.tensor([0.0, 0.0, 1.0, 3.0]), 2)
        tensor([0.2500, 0.2500, 0.5000, 1.0000], dtype=torch.float64)
    """
    mixed = scores.double() + scores.double().mean()
    if not torch.isfinite(mixed).all() or not (mixed > 0).all():
        mixed = torch.ones_like(mixed)
    ordered = mixed.sort(descending=True).values
    # with the k largest at 1, the others share what is left in proportion; k is the first that leaves none above 1
    rest = ordered.flip(0).cumsum(0).flip(0)
    factors = (count - torch.arange(len(ordered))) / rest
    fits = (factors * ordered <= 1 + 1e-12).nonzero()[0]
    return (factors[fits] * mixed).clamp_(max=1)


def systematic_draw(probabilities: Tensor, count: int, *key: int | str) -> Tensor:
    """Draw exactly ``count`` samples, each with its probability: one uniform number, then equal strides.

    Args:
        probabilities: Shape (batch,), with sum ``count``.
        count: Samples to draw.
        *key: Key of the draw.

    Returns:
        Their numbers, ascending.
    """
    ends = probabilities.cumsum(0)
    ends[-1] = count
    start = torch.rand((), generator=_generator(*key), dtype=torch.float64)
    return torch.searchsorted(ends, start + torch.arange(count), right=True)


def repeats(probabilities: Tensor, *key: int | str) -> Tensor:
    r"""Return how often each drawn sample counts: :math:`N_i = \lfloor 1/p_i + u_i \rfloor`, with mean 1/p.

    Args:
        probabilities: Those of the drawn samples, shape (samples,).
        *key: Key of the draws, the same on all ranks.

    Returns:
        Shape (samples,), int64, each at least 1.
    """
    uniform = torch.rand(len(probabilities), generator=_generator(*key), dtype=torch.float64)
    return (1 / probabilities.double().cpu() + uniform).floor().long()


def _generator(*key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*key))
