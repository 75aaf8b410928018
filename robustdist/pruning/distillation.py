"""The dense model teaches the small one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from robustdist.errors import UsageError

__all__ = ["check_distillation", "distilled"]


def distilled(task_loss: Tensor, student: Tensor, teacher: Tensor, *, weight: float, temperature: float) -> Tensor:
    r"""Return the task's loss mixed with the distance to the teacher's predictions.

    .. math:: (1 - w) \, L + w \, T^2 \, \mathrm{KL}\big(\mathrm{softmax}(t / T) \,\|\, \mathrm{softmax}(s / T)\big)

    Args:
        task_loss: Scalar L.
        student: Logits s, shape (batch, ..., classes).
        teacher: Logits t of the same shape; no gradient flows into them.
        weight: w in [0, 1].
        temperature: T > 0.

    Returns:
        A scalar; the divergence is the mean over samples.

    Raises:
        UsageError: If the shapes differ.

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network".
    """
    if student.shape != teacher.shape:
        raise UsageError(
            f"distill: the student's logits have shape {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}: "
            "name the part that returns logits with the option forward"
        )
    dtype = torch.promote_types(student.dtype, torch.float32)
    log_student = F.log_softmax(student.to(dtype) / temperature, -1).flatten(0, -2)
    log_teacher = F.log_softmax(teacher.detach().to(dtype) / temperature, -1).flatten(0, -2)
    divergence = F.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean")
    return (1 - weight) * task_loss + weight * temperature**2 * divergence


def check_distillation(weight: float, temperature: float) -> None:
    """Check the options.

    Raises:
        UsageError: If one is out of range.
    """
    if not 0 <= weight <= 1:
        raise UsageError(f"distill={weight} is out of range: give the weight of the teacher, in [0, 1]")
    if not temperature > 0:
        raise UsageError(f"distill_temperature={temperature} must be positive: 2 is usual")
