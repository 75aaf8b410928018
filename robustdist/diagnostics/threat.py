"""The threat model of an evaluation, and the attacks that examine it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from robustdist.attacks import FGSM, PGD, Attack, Square

__all__ = ["Threat"]

# The doubling of the radius stops here; the largest radius of all is half of the image box, where every image can be
# turned into the same grey one.
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Threat:
    """Makes attacks with the norm, radius, units and seed of an evaluation's first attack that has a radius.

    Its loss is followed too, if that attack is projected gradient descent; for all others it is the margin.

    Attributes:
        reference: The attack that is taken after.
        follows_gradients: Whether all attacks of the evaluation follow input gradients.
    """

    reference: Attack
    follows_gradients: bool = True

    @classmethod
    def of(cls, attacks: Mapping[str, Attack]) -> Threat | None:
        """Return the threat model of ``attacks``, None if none of them has a radius above 0."""
        # a stage of an ensemble counts as an attack
        single = [stage for attack in attacks.values() for stage in getattr(attack, "attacks", [attack])]
        follows = all(attack.uses_gradient for attack in single)
        return next((cls(attack, follows) for attack in attacks.values() if attack.radius), None)

    @property
    def eps(self) -> float:
        """The radius."""
        return self.reference.eps

    def _shared(self) -> dict[str, Any]:
        names = ("norm", "bounds", "mean", "std", "model_mode", "seed")
        return {name: getattr(self.reference, name) for name in names}

    def _own_loss(self) -> Any:
        return self.reference.attack_loss if isinstance(self.reference, PGD) else "margin"

    def descent(self, steps: int, *, eps: float | None = None, restart: int | None = None, loss: Any = None) -> PGD:
        """Return projected gradient descent with steps of a quarter of the radius.

        Args:
            steps: Number of steps.
            eps: Another radius.
            restart: Number of the random start; None starts at the image.
            loss: Another loss.
        """
        eps = self.eps if eps is None else eps
        shared = self._shared()
        if restart is not None:
            shared["seed"] += restart
        return PGD(
            eps=eps,
            steps=steps,
            step_size=eps / 4,
            random_start=restart is not None,
            attack_loss=self._own_loss() if loss is None else loss,
            **shared,
        )

    def one_step(self) -> FGSM:
        """Return the attack with one step of the whole radius."""
        return FGSM(eps=self.eps, attack_loss=self._own_loss(), **self._shared())

    def random_search(self, queries: int) -> Square:
        """Return the attack without gradients."""
        return Square(eps=self.eps, queries=queries, **self._shared())

    def has_random_search(self, x: Tensor) -> bool:
        """Return whether :meth:`random_search` knows this norm and kind of input."""
        return self.reference.norm in ("linf", "l2") and x.dim() == 4

    def radii(self, x: Tensor) -> list[float]:
        """Return the radii of the curve for inputs like ``x``: multiples of the radius, and one that spares nobody."""
        bounds = self.reference.bounds
        if bounds is None:
            return [factor * self.eps for factor in (*_FACTORS, 16.0)]
        span, size = bounds[1] - bounds[0], x[0].numel()
        diameter = span * {"linf": 1.0, "l2": size**0.5, "l1": float(size)}[self.reference.norm]
        largest = diameter / 2 if self.eps < diameter / 2 else diameter
        return [*(factor * self.eps for factor in _FACTORS if factor * self.eps < largest), largest]
