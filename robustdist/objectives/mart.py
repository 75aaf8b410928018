"""MART."""

from __future__ import annotations

from torch import Tensor

from robustdist.attacks.base import Attack
from robustdist.attacks.losses import check_class_indices
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.losses import mart_loss

__all__ = ["MART"]


class MART(Objective):
    r"""Boosted cross-entropy on adversarial inputs, and a divergence that weighs misclassified samples more.

    .. math:: E\Big[ -\log p_y(x') - \log(1 - \max_{k \ne y} p_k(x')) + \beta \, KL(p(x) \| p(x')) (1 - p_y(x)) \Big]

    The attack maximises cross-entropy from ``x`` plus normal noise of standard deviation 0.001. This loss replaces the
    module's own, whose step still runs on the adversarial inputs for its logs and its logits. It raises the accuracy
    under PGD more than that under stronger attacks: judge it with more than PGD.

    Args:
        beta: Weight of the divergence, at least 0.

    Raises:
        UsageError: If ``beta`` is negative, or the targets are not class indices.

    References:
        Wang et al., "Improving Adversarial Robustness Requires Revisiting Misclassified Examples".
    """

    needs_second_pass = True
    replaces_loss = True

    def __init__(self, beta: float = 5.0) -> None:
        if not 0 <= beta < float("inf"):
            raise UsageError(f"beta={beta} must be a finite number that is not negative")
        self.beta = beta

    def adapt(self, attack: Attack) -> Attack:
        """Return the attack with the start of the paper."""
        return attack.variant(random_start=True, start_std=0.001, restarts=1)

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the mean loss."""
        x_adv = context.attack(context.x, context.y)
        ordinary, logits_adv = context.loss_and_logits(x_adv)
        if ordinary is None:
            return None
        check_class_indices(logits_adv, context.y, remedy="MART is about class indices, use PGDAT or DAT")
        logits = context.logits(context.x)
        return mart_loss(logits, logits_adv, context.y.long(), self.beta).mean()
