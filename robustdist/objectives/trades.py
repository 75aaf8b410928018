"""TRADES."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from robustdist.attacks.base import Attack
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.losses import check_class_predictions, kl_divergence

__all__ = ["TRADES"]


class TRADES(Objective):
    r"""The ordinary loss on clean inputs plus the divergence between clean and adversarial predictions.

    .. math:: \min_\theta \ell(\theta; x, y) + \beta \max_{x'} KL\big(p_\theta(x) \,\|\, p_\theta(x')\big)

    The inner problem maximises the divergence itself, without labels, from ``x`` plus normal noise of standard
    deviation 0.001; the user's attack gives norm, radius and steps. The clean prediction is computed once for all
    attack steps, and is not detached in the outer loss. With a Trainer the first term is the module's own loss, the
    paper's if that is cross-entropy; so clean and adversarial inputs make two outer passes, not one of both together.

    Args:
        beta: Weight of the divergence, at least 0.

    Raises:
        UsageError: If ``beta`` is negative, or outputs and targets are not about classes.

    References:
        Zhang et al., "Theoretically Principled Trade-off between Robustness and Accuracy".
    """

    needs_second_pass = True
    attacks_predictions = True

    def __init__(self, beta: float = 6.0) -> None:
        if not 0 <= beta < float("inf"):
            raise UsageError(f"beta={beta} must be a finite number that is not negative")
        self.beta = beta

    def adapt(self, attack: Attack) -> Attack:
        """Return the attack with the divergence as its loss and the start of the paper."""
        return attack.with_loss(kl_divergence).variant(random_start=True, start_std=0.001, restarts=1)

    def trial_targets(self, logits: Tensor, y: Any) -> Any:
        """Return the clean predictions; refuse outputs and targets that are not about classes."""
        check_class_predictions(logits, y, type(self).__name__)
        return super().trial_targets(logits, y)

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the ordinary loss plus ``beta`` times the mean divergence."""
        reference = context.reference(context.x)
        check_class_predictions(reference, context.y, type(self).__name__)
        x_adv = context.attack(context.x, reference)
        loss, logits = context.loss_and_logits(context.x)
        if loss is None:
            return None
        divergence = kl_divergence(context.logits(x_adv), logits).mean()
        context.logs["divergence"] = divergence.detach()
        return loss + self.beta * divergence
