"""Losses that several objectives share; one value per sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from robustdist.errors import UsageError

__all__ = ["check_class_predictions", "kl_divergence", "mart_loss", "smoothed"]


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


def check_class_predictions(logits: Tensor, y: Any, name: str) -> None:
    """Refuse outputs and targets that are not about one class out of several, where softmax means nothing.

    Targets may be class indices or probabilities, in any shape; what is no tensor is not looked at.

    Args:
        logits: Output of the model, classes in the second dimension.
        y: The targets.
        name: The objective.

    Raises:
        UsageError: Naming the objective.
    """
    remedy = f"{name} compares probabilities of classes, use PGDAT or DAT with attack_loss or attack_step"
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise UsageError(f"the model returned shape {tuple(logits.shape)}, not (batch, classes, ...): {remedy}")
    if isinstance(y, Tensor) and (y.is_floating_point() or y.dtype == torch.bool):
        rows = y.float() if y.shape == logits.shape else None
        if rows is None or bool((rows < 0).any()) or bool(((rows.sum(1) - 1).abs() > 1e-2).any()):
            raise UsageError(f"the targets are {y.dtype} of shape {tuple(y.shape)}, no classes: {remedy}")


def kl_divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    r"""Return :math:`KL(p(\text{target}) \| p(\text{logits}))` of every row, shape (batch,).

    From log-softmax on both sides in at least float32, so that large logits give no NaN; summed over classes, so that
    its size does not fall with their number.
    """
    divergence = F.kl_div(_log_softmax(logits), _log_softmax(target_logits), reduction="none", log_target=True)
    return divergence.sum(1)


def mart_loss(logits: Tensor, logits_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    r"""Return the loss of MART of every row, shape (batch,).

    .. math:: -\log p_y(x') - \log\big(1 - \max_{k \ne y} p_k(x')\big) + \beta \, KL(p(x) \| p(x')) (1 - p_y(x))

    The second term is :math:`-\log(1 - p)` from the log of the probability, which stays finite when a wrong class is
    certain: the probability is held below 1 by the constants of the released code.
    """
    log_adv = _log_softmax(logits_adv)
    own = log_adv.gather(1, y[:, None])[:, 0]
    largest_other = log_adv.scatter(1, y[:, None], -torch.inf).amax(1).exp()
    boosted = -own - torch.log(1.0001 - largest_other + 1e-12)
    unsure = 1.0000001 - _log_softmax(logits).gather(1, y[:, None])[:, 0].exp()
    return boosted + beta * kl_divergence(logits_adv, logits) * unsure


def smoothed(loss: Tensor, logits: Tensor, amount: float) -> Tensor:
    r"""Return :math:`(1 - a) \ell - \frac{a}{K} \sum_k E[\log p_k(x)]` for K classes.

    With the mean cross-entropy for :math:`\ell` this is cross-entropy to targets that are smoothed by ``amount``.
    """
    return (1 - amount) * loss - amount * _log_softmax(logits).mean()
