"""What an attack increases: losses with one value per sample, and whether the targets fit them."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from robustdist.errors import UsageError
from robustdist.types import AttackLoss

__all__ = ["LOSSES", "LossName", "check_class_indices", "checked_loss", "targeted_dlr"]

LossName: TypeAlias = Literal["ce", "margin", "dlr"]

# Keeps the ratio finite where the logits that it divides by are equal.
_TINY_GAP = 1e-12


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y.long(), reduction="none")


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    column = y.long()[:, None]
    own = logits.gather(1, column)[:, 0]
    best_other = logits.scatter(1, column, -math.inf).amax(1)
    return best_other - own


def _dlr(logits: Tensor, y: Tensor) -> Tensor:
    margin = _margin(logits, y)
    if logits.shape[1] < 3:
        return margin
    first, _, third = logits.topk(3, dim=1).values.unbind(1)
    return margin / (first - third).clamp(min=_TINY_GAP)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    r"""Return the targeted difference of logits ratio per row; with fewer than four classes its numerator.

    .. math:: - \frac{z_y - z_t}{z_{\pi_1} - (z_{\pi_3} + z_{\pi_4}) / 2}

    where :math:`\pi` sorts the logits in falling order.

    Args:
        logits: Shape (batch, classes).
        y: Own classes, shape (batch,).
        target: Classes to reach, shape (batch,).

    References:
        Croce and Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free
        Attacks".
    """
    own, aim = logits.gather(1, torch.stack([y.long(), target], 1)).unbind(1)
    if logits.shape[1] < 4:
        return aim - own
    first, _, third, fourth = logits.topk(4, dim=1).values.unbind(1)
    return (aim - own) / (first - (third + fourth) / 2).clamp(min=_TINY_GAP)


#: Losses by name. "dlr", the difference of logits ratio :math:`-(z_y - \max_{i \ne y} z_i) / (z_{\pi_1} - z_{\pi_3})`,
#: does not change with the scale of the logits; for two classes, which have no third logit, it is the margin.
LOSSES: dict[str, AttackLoss] = {"ce": _cross_entropy, "margin": _margin, "dlr": _dlr}


def checked_loss(attack_loss: LossName | AttackLoss) -> LossName | AttackLoss:
    """Return ``attack_loss`` if it is the name of a loss or a function.

    Raises:
        UsageError: If it is neither.
    """
    if callable(attack_loss) or attack_loss in LOSSES:
        return attack_loss
    raise UsageError(
        f"attack_loss={attack_loss!r} is unknown: choose ce, margin, dlr or pass a function of (logits, target)"
    )


def check_class_indices(
    logits: Tensor, y: Any, remedy: str = "set attack_loss to a function of (output, target) for other tasks"
) -> None:
    """Refuse targets that are not class indices.

    Args:
        logits: Output of the model.
        y: The targets.
        remedy: What to do about it, the end of the message.

    Raises:
        UsageError: If ``y`` is not an integer tensor of shape (batch,) with values in [0, classes).
    """
    if logits.dim() != 2:
        raise UsageError(f"the model returned shape {tuple(logits.shape)}, not (batch, classes): {remedy}")
    if logits.shape[1] < 2:
        raise UsageError(f"the model has one output, so there is no other class to move to: {remedy}")
    integer = isinstance(y, Tensor) and not y.is_floating_point() and not y.is_complex() and y.dtype != torch.bool
    if not integer or y.dim() != 1 or len(y) != len(logits):
        found = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise UsageError(f"the targets are {found}, not class indices of shape (batch,): {remedy}")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < logits.shape[1]:
        raise UsageError(
            f"the targets span [{int(y.min())}, {int(y.max())}] but the model has {logits.shape[1]} classes: "
            "map them to 0..classes-1"
        )
