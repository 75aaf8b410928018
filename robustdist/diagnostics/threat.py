"""The threat model of an evaluation, and the attacks that examine it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robustdist.attacks import FGSM, PGD, Attack, Square

__all__ = ["Threat", "compared"]

# The doubling of the radius stops here; the largest radius of all is half of the image box (without a box, half of the
# range of the images at hand), where every image can be turned into the same grey one.
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SAME = 1e-9


@dataclass(frozen=True)
class Threat:
    """Makes attacks with the norm, radius, units and seed of an evaluation's first attack that has a radius.

    Its loss is followed too, if that attack is projected gradient descent; for all others it is the margin. Verdicts of
    attacks with another norm, radius or box say nothing about this one, so they are left out of every comparison.

    Attributes:
        reference: The attack that is taken after.
        follows_gradients: Whether all attacks that are compared follow input gradients.
        compared: Names of the attacks with the reference's norm, radius and box.
        left_out: Names of the others.
    """

    reference: Attack
    follows_gradients: bool = True
    compared: Sequence[str] = ()
    left_out: Sequence[str] = ()

    @classmethod
    def of(cls, attacks: Mapping[str, Attack]) -> Threat | None:
        """Return the threat model of ``attacks``, None if none of them has a radius above 0."""
        reference = next((attack for attack in attacks.values() if attack.radius), None)
        if reference is None:
            return None
        compared = [name for name, attack in attacks.items() if _alike(attack, reference)]
        # a stage of an ensemble counts as an attack
        single = [stage for name in compared for stage in getattr(attacks[name], "attacks", [attacks[name]])]
        follows = all(attack.uses_gradient for attack in single)
        return cls(reference, follows, compared, [name for name in attacks if name not in compared])

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

    def span(self, inputs: Sequence[Tensor]) -> tuple[float, float]:
        """Return the smallest and the largest pixel that an image can have: the box, without one that of ``inputs``."""
        bounds = self.reference.bounds
        if bounds is not None:
            return bounds[0], bounds[1]
        ends = [torch.aminmax(self.reference.to_pixels(x)) for x in inputs if x.numel()]
        low = min((float(end.min) for end in ends), default=math.inf)
        return low, max((float(end.max) for end in ends), default=-math.inf)

    def radii(self, size: int, low: float, high: float) -> list[float]:
        """Return the radii of the curve: multiples of the radius, and one that spares nobody.

        Args:
            size: Number of pixel values of an image.
            low: Smallest pixel of all images, as :meth:`span` returns it.
            high: Largest pixel.
        """
        diameter = (high - low) * {"linf": 1.0, "l2": size**0.5, "l1": float(size)}[self.reference.norm]
        largest = diameter / 2 if self.eps < diameter / 2 else max(diameter, self.eps)
        return [*(factor * self.eps for factor in _FACTORS if factor * self.eps < largest), largest]


def compared(attacks: Mapping[str, Attack]) -> Sequence[str]:
    """Return the names of the attacks whose verdicts an examination may hold against its own."""
    threat = Threat.of(attacks)
    return tuple(attacks) if threat is None else threat.compared


def _alike(attack: Attack, reference: Attack) -> bool:
    radii = attack.radius, reference.radius
    return (
        (attack.norm, attack.bounds) == (reference.norm, reference.bounds)
        and None not in radii
        and math.isclose(attack.eps, reference.eps, rel_tol=_SAME)
    )
