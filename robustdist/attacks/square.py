"""Square attack: random search over square patches, without gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.losses import LossName, check_class_indices
from robustdist.attacks.queue import batch_places, run_queue
from robustdist.attacks.square_proposals import ENGINES
from robustdist.errors import UsageError
from robustdist.types import NORMS, AttackLoss, Number, check_count

__all__ = ["Square"]


class Square(Attack):
    """Random search: recolour one random square, keep it if the margin falls.

    A query proposes a square of the image, sets each channel of it to one corner of the ball (linf), or moves the
    budget of a second square into it (l2), and keeps the result if the own logit's lead over the best other falls. The
    squares start with the share ``p_init`` of the image and shrink on the published schedule for 10,000 queries. It
    needs no gradient, so it also sees through gradients that vanish.

    All draws of a row come from one stream of its own, so the batch it sits in changes nothing. A proposal equal to
    the point at hand is answered without a forward pass, but counts as a query.

    Args:
        norm: "linf" or "l2".
        eps: Radius in pixel units.
        queries: Forward passes per image and restart, the one for the starting point included.
        p_init: Share of the image that the first squares cover, in (0, 1].
        rescale: Whether the schedule is compressed to ``queries``; False follows the published numbers of queries, as
            AutoAttack does.
        restarts: Number of runs from different draws; later ones see the survivors of earlier ones.
        drop: Whether an image leaves as soon as it is misclassified.
        batch_size: Largest number of images in one forward pass; default the batch of the call. Draws are held for at
            most twice as many, ``4 * queries * (2 + channels)`` bytes each (linf; l2 ``5 + channels``).
        look_ahead: Whether places in a batch that fallen images leave free are filled with the next proposals of those
            left, up to 32 places. The search and what it finds stay the same. Proposals behind one that is kept are
            asked in vain, so with False an image costs ``queries`` forward passes at most, with True fewer seconds.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`; ``attack_loss`` must stay "margin".

    Raises:
        UsageError: If an argument is out of range.

    References:
        Andriushchenko et al., "Square Attack: a Query-Efficient Black-box Adversarial Attack via Random Search".
    """

    uses_gradient = False

    def __init__(
        self,
        *,
        eps: Number = "8/255",
        queries: int = 5000,
        p_init: float = 0.8,
        rescale: bool = True,
        restarts: int = 1,
        drop: bool = True,
        batch_size: int | None = None,
        look_ahead: bool = False,
        attack_loss: LossName | AttackLoss = "margin",
        **kwargs: Any,
    ) -> None:
        check_count(queries, "queries")
        check_count(restarts, "restarts")
        if batch_size is not None:
            check_count(batch_size, "batch_size")
        if not 0 < p_init <= 1:
            raise UsageError(f"p_init={p_init} must be in (0, 1]: it is the share of the image in the first square")
        norm = kwargs.get("norm", "linf")
        if norm in NORMS and norm not in ENGINES:
            raise UsageError(f"norm={norm!r} has no square search here: use norm='linf' or 'l2'")
        if attack_loss != "margin":
            raise UsageError("Square compares margins: leave attack_loss out, or use PGD for other losses")
        super().__init__(eps=eps, step_size=0.0, attack_loss="margin", **kwargs)
        self.queries, self.p_init, self.rescale, self.restarts = queries, p_init, rescale, restarts
        self.drop, self.batch_size, self.look_ahead = drop, batch_size, look_ahead

    def perturb(self, problem: Problem) -> Tensor:
        """Return the best point of every image."""
        problem.followed.fill_(True)  # it follows no gradient
        check_class_indices(problem.judge(problem.x, self.batch_size), problem.y)
        rows_ahead = batch_places(problem, self.batch_size) if self.look_ahead else 0
        engine = ENGINES[problem.norm](
            problem, self.queries, self.p_init, self.restarts, rescale=self.rescale, rows_ahead=rows_ahead
        )
        return run_queue(problem, engine, batch_size=self.batch_size, drop=self.drop).x_adv

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Refuse any other loss than the margin."""
        if attack_loss == "margin":
            return self
        raise UsageError(f"Square compares margins, so attack_loss={attack_loss!r} cannot be used: remove it")

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values."""
        settings = super().settings()
        del settings["step_size"]
        return settings
