"""Adversarial training in its plainest form."""

from __future__ import annotations

from torch import Tensor

from robustdist.objectives.base import Objective, ObjectiveContext

__all__ = ["PGDAT"]


class PGDAT(Objective):
    r"""Train on adversarial inputs in place of the clean ones.

    .. math:: \min_\theta E \max_{\|\delta\| \le \epsilon} \ell(\theta; x + \delta, y)

    :math:`\ell` is whatever the module's ``training_step`` computes. With Lightning's manual optimisation this is the
    objective that works, since the step runs once.

    References:
        Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks".
    """

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the ordinary loss at the adversarial inputs."""
        return context.loss(context.attack(context.x, context.y))
