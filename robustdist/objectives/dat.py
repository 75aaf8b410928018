"""Distributed adversarial training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from robustdist.attacks.base import Attack
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.losses import kl_divergence
from robustdist.types import UNLABELED

__all__ = ["DAT"]


class DAT(Objective):
    r"""The local objective of distributed adversarial training: a weighted clean loss plus the robust loss.

    Worker :math:`i` of :math:`M` minimises, on its own data,

    .. math:: f_i(\theta) = \lambda \, E[\ell(\theta; x, y)]
              + E\big[\max_{\|\delta\|_\infty \le \epsilon} \ell(\theta; x + \delta, y)\big]
              + \mu \, E_u\big[\max_{\|\delta\|_\infty \le \epsilon} \phi(\theta; x, \delta)\big]

    and the workers average their gradients, :math:`\min_\theta \frac1M \sum_i f_i(\theta)`. The inner maximisation is
    purely local: no worker waits for another one's attack. ``clean_weight=1`` with :class:`~robustdist.attacks.PGD` is
    the PGD form of the method, ``clean_weight=0`` with ``FGSM(random_start=True, step_size=1.25 * eps)`` its one-step
    form; ``clean_weight=0`` with PGD equals :class:`PGDAT` bit for bit. The layer-wise optimiser that goes with large
    batches is :class:`robustdist.optim.LALR`.

    :math:`E_u` runs over the samples without label, those whose integer target is -1
    (:class:`robustdist.data.UnlabeledMix` mixes them in); the other two means run over those with a label, each over
    what this worker's batch holds of them. The module's step sees labelled samples and guessed labels, never -1.

    - ``unlabeled="pseudo"``: :math:`\phi = \ell(\theta; x + \delta, \hat y)` with the class :math:`\hat y` that the
      model, in eval mode, gives the clean sample now.
    - ``unlabeled="kl"``: :math:`\phi = KL(p(x) \,\|\, p_\theta(x + \delta))`, without labels, also for the attack;
      :math:`p(x)` is the clean prediction in eval mode, held constant.

    The adversarial pass over the labelled samples is the one whose logs and metrics appear; all others are muted and
    logged as ``robust/clean_loss`` and ``robust/unlabeled_loss``.

    Args:
        clean_weight: :math:`\lambda`, at least 0. With 0 the clean pass is not made.
        unlabeled_weight: :math:`\mu`, at least 0.
        unlabeled: :math:`\phi`, "pseudo" or "kl".

    Raises:
        UsageError: If an argument is out of range; with unlabelled samples in manual optimisation, or in batches with
            entries that cannot be cut; for a part of a batch with one sample where batch norm needs two. What one
            process refuses all of them refuse: they agree in every step, by one exchange of a few bytes.

    References:
        Zhang et al., "Distributed Adversarial Training to Robustify Deep Neural Networks at Scale".
        Carmon et al., "Unlabeled Data Improves Adversarial Robustness" (pseudo-labels).
        Alayrac et al., "Are Labels Required for Improving Adversarial Robustness?" (the divergence).
    """

    def __init__(
        self,
        clean_weight: float = 1.0,
        unlabeled_weight: float = 1.0,
        unlabeled: Literal["pseudo", "kl"] = "pseudo",
    ) -> None:
        for option, weight in (("clean_weight", clean_weight), ("unlabeled_weight", unlabeled_weight)):
            if not 0 <= weight < float("inf"):
                raise UsageError(f"{option}={weight} must be a finite number that is not negative")
        if unlabeled not in ("pseudo", "kl"):
            raise UsageError(f"unlabeled={unlabeled!r} is unknown: choose pseudo or kl")
        self.clean_weight = clean_weight
        self.unlabeled_weight = unlabeled_weight
        self.unlabeled: Literal["pseudo", "kl"] = unlabeled
        self.needs_second_pass = clean_weight > 0
        self.refuses_by_batch = True

    def adapt(self, attack: Attack) -> Attack:
        """Return the attack; refuse one that cannot follow the divergence."""
        if self.unlabeled == "kl":
            attack.with_loss(kl_divergence)
        return attack

    def trial_targets(self, logits: Tensor, y: Any) -> Any:
        """Return the targets, with the predicted class where there is none."""
        missing = _missing(y)
        return y if missing is None else torch.where(missing, logits.argmax(1).to(y), y)

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the sum of robust, clean and unlabelled loss, as far as the batch has samples for them."""
        try:
            return self._total(context)
        except ValueError as error:
            if _ONE_VALUE not in str(error):
                raise
            raise UsageError(
                "batch norm cannot train on the only sample with or without label in a batch: raise the batch size, "
                "drop the last batch of an epoch (drop_last=True), or mix in more samples of that kind"
            ) from error

    def _total(self, context: ObjectiveContext) -> Tensor | None:
        missing = _missing(context.y)
        if missing is None:
            return self._supervised(context, context, context.attack(context.x, context.y))
        labeled, unlabeled = (~missing).nonzero()[:, 0], missing.nonzero()[:, 0]
        make = self._pseudo if self.unlabeled == "pseudo" else self._divergence
        x_adv, unlabeled_loss = make(context, labeled, unlabeled)
        supervised = self._supervised(context, context.take(labeled), x_adv) if len(labeled) else None
        extra = unlabeled_loss() if supervised is not None or not len(labeled) else None
        if extra is None:
            return None  # the module's step asked to skip the batch
        context.logs["unlabeled_loss"] = extra.detach()
        return self.unlabeled_weight * extra + (0 if supervised is None else supervised)

    def _supervised(self, context: ObjectiveContext, part: ObjectiveContext, x_adv: Tensor) -> Tensor | None:
        robust = part.loss(x_adv)
        if robust is None or self.clean_weight == 0:
            return robust
        clean = part.loss(part.x)
        if clean is None:
            return None
        context.logs["clean_loss"] = clean.detach()
        context.logs["adv_loss"] = robust.detach()
        return robust + self.clean_weight * clean

    def _pseudo(self, context: ObjectiveContext, labeled: Tensor, unlabeled: Tensor) -> _Attacked:
        guesses = context.take(unlabeled).reference(context.x[unlabeled]).argmax(1).to(context.y)
        # one attack for all: to it a guess is a label
        x_adv = context.attack(context.x, context.y.index_copy(0, unlabeled, guesses))
        return x_adv[labeled], lambda: context.take(unlabeled, guesses).loss(x_adv[unlabeled])

    def _divergence(self, context: ObjectiveContext, labeled: Tensor, unlabeled: Tensor) -> _Attacked:
        x_adv = context.x[:0]
        if len(labeled):
            known = context.take(labeled)
            x_adv = known.attack(known.x, known.y)
        part = context.take(unlabeled)
        reference = part.reference(part.x)
        x_adv_unlabeled = part.attack(part.x, reference, attack_loss=kl_divergence)
        return x_adv, lambda: kl_divergence(part.logits(x_adv_unlabeled), reference).mean()


# What torch says of batch norm in training with one value per channel.
_ONE_VALUE = "Expected more than 1 value per channel when training"

#: Adversarial inputs with a label, and what computes the loss on those without.
_Attacked = tuple[Tensor, Callable[[], Tensor | None]]


def _missing(y: Any) -> Tensor | None:
    """Return where labels are missing, shape (batch,), or None where all are there."""
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point():
        return None
    missing = y == UNLABELED
    return missing if bool(missing.any()) else None
