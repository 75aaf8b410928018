"""Distributed adversarial training."""

from __future__ import annotations

from torch import Tensor

from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext

__all__ = ["DAT"]


class DAT(Objective):
    r"""The local objective of distributed adversarial training: a weighted clean loss plus the robust loss.

    Worker :math:`i` of :math:`M` minimises, on its own data,

    .. math:: f_i(\theta) = \lambda \, E[\ell(\theta; x, y)]
              + E\big[\max_{\|\delta\|_\infty \le \epsilon} \ell(\theta; x + \delta, y)\big]

    and the workers average their gradients, :math:`\min_\theta \frac1M \sum_i f_i(\theta)`. The inner maximisation is
    purely local: no worker waits for another one's attack. ``clean_weight=1`` with :class:`~robustdist.attacks.PGD` is
    the PGD form of the method, ``clean_weight=0`` with ``FGSM(random_start=True, step_size=1.25 * eps)`` its one-step
    form; ``clean_weight=0`` with PGD equals :class:`PGDAT` bit for bit. The layer-wise optimiser that goes with large
    batches is :class:`robustdist.optim.LALR`.

    The adversarial pass is the one whose logs and metrics appear; the clean pass is muted and its loss is logged as
    ``robust/clean_loss``.

    Args:
        clean_weight: :math:`\lambda`, at least 0. With 0 the clean pass is not made.

    Raises:
        UsageError: If ``clean_weight`` is negative.

    References:
        Zhang et al., "Distributed Adversarial Training to Robustify Deep Neural Networks at Scale".
    """

    def __init__(self, clean_weight: float = 1.0) -> None:
        if not 0 <= clean_weight < float("inf"):
            raise UsageError(f"clean_weight={clean_weight} must be a finite number that is not negative")
        self.clean_weight = clean_weight
        self.needs_second_pass = clean_weight > 0

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the robust loss plus ``clean_weight`` times the clean loss."""
        robust = context.loss(context.attack(context.x, context.y))
        if robust is None or self.clean_weight == 0:
            return robust
        clean = context.loss(context.x)
        if clean is None:
            return None
        context.logs["clean_loss"] = clean.detach()
        context.logs["adv_loss"] = robust.detach()
        return robust + self.clean_weight * clean
