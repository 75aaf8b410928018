"""What an evaluation finds out about itself while it counts, and the checks that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from robustdist.attacks.base import Attack
from robustdist.evaluation.forwards import NUM_FORWARDS
from robustdist.evaluation.records import Records
from robustdist.report.result import CHECKS, Check

__all__ = ["CHECKS", "Findings", "cheap_checks", "excess"]

# Rounding by which a perturbation may exceed its radius, relative to the pixel range.
_BUDGET_SLACK = 1e-6
# The same for a sum over many pixels, relative to the radius: float32 cannot do better on large images.
_L1_ROUNDING = 1e-4
# Share of attacked samples without an input gradient above which the evaluation is not to be trusted.
_NO_GRADIENT_SHARE = 0.01
# How far a repeated forward pass may be away, relative to the largest logit.
_SPREAD = 1e-4
# Classes that the targeted difference-of-logits loss needs: it divides by the first minus the mean of the next two
# of the other logits.
_CLASSES_OF_DLR = 4


@dataclass
class Findings:
    """The worst that was seen; processes and resumed runs are merged by the maximum of every entry.

    Attributes:
        excess: Largest excess over the radius or the pixel range, relative to the pixel range.
        probabilities: 1 if the model returns probabilities.
        spread: Largest relative difference between repeated forward passes.
        changed: Predictions that differ between repeated forward passes of a batch.
        autograd: 1 if the forward pass differentiates something itself.
        num_classes: Logits per image.
        moved_at_zero: Predictions that an attack with radius 0 changed.
        radii: Attacks that have a radius, and so can be given the radius 0.
        uncertain: 1 if padded samples could not be told from real ones.
    """

    excess: float = 0.0
    probabilities: float = 0.0
    spread: float = 0.0
    changed: float = 0.0
    autograd: float = 0.0
    num_classes: float = 0.0
    moved_at_zero: float = 0.0
    radii: float = 0.0
    uncertain: float = 0.0

    def merge(self, others: Sequence[Findings]) -> None:
        """Take the maximum over this and ``others``."""
        for entry in fields(self):
            setattr(self, entry.name, max(getattr(found, entry.name) for found in (self, *others)))


def excess(attack: Attack, x_adv: Tensor, x: Tensor, mask: Tensor | None = None) -> float:
    """Return by how much ``x_adv`` exceeds the radius around ``x`` or the pixel range, relative to that range.

    Without a range relative to the largest pixel. Measured in pixel units, after the normalisation was undone, and for
    embeddings as their attack measures them; infinite for an image that is not finite. ``mask`` says which tokens of a
    sequence are real.
    """
    adversarial, clean = attack.to_pixels(x_adv), attack.to_pixels(x)
    if not bool(torch.isfinite(adversarial).all()):
        return float("inf")
    # rounding is relative to the largest number there is
    largest = max(1.0, float(clean.abs().max()) if clean.numel() else 1.0)
    span = largest if attack.bounds is None else attack.bounds[1] - attack.bounds[0]
    found = 0.0
    if attack.radius is not None:
        radius = attack.eps * (1 + _L1_ROUNDING) if attack.norm == "l1" else attack.eps
        found = float(attack.distance(x_adv, x, mask).max()) - radius
    if attack.bounds is not None:
        low, high = (float(value) for value in torch.aminmax(adversarial))
        # a white pixel normalised in half precision lies a little outside already
        allowed_low, allowed_high = (float(value) for value in torch.aminmax(clean))
        found = max(found, min(attack.bounds[0], allowed_low) - low, high - max(attack.bounds[1], allowed_high))
    return found / span


def cheap_checks(records: Records, findings: Findings) -> dict[str, Check]:
    """Return the checks that cost an evaluation nothing but a few forward passes.

    What there was nothing to look at for, no image or no attack with a radius, counts as not run.
    """
    attacked = int(records.clean.sum()) * len(records.attacks)
    blind = sum(int(records.column(name, "blind").sum()) for name in records.attacks)
    share = blind / max(1, attacked)
    classes = int(findings.num_classes)
    targets = max(1, min(9, classes - 1))
    enough = classes >= _CLASSES_OF_DLR
    checks = {
        "budget": Check(
            findings.excess <= _BUDGET_SLACK,
            f"largest excess over the radius or the pixel range: {findings.excess:.1e}",
        ),
        "gradient": Check(
            share <= _NO_GRADIENT_SHARE, f"{100 * share:.1f} % of the attacked images had no input gradient to follow"
        ),
        "logits": Check(
            not findings.probabilities, "the model returns " + ("probabilities" if findings.probabilities else "logits")
        ),
        "deterministic": Check(
            findings.spread <= _SPREAD and not findings.changed,
            f"{NUM_FORWARDS} forward passes of one batch "
            + (
                f"differ by {findings.spread:.1e} of the largest logit, in {findings.changed:.0f} predictions: "
                "average over many passes (AutoAttack version rand)"
                if findings.spread > _SPREAD or findings.changed
                else "agree"
            ),
        ),
        "counted_once": Check(
            not findings.uncertain,
            "the sampler is unknown: padded samples may be counted twice"
            if findings.uncertain
            else f"{len(records)} samples, each counted once over all processes",
        ),
        "plain_forward": Check(
            not findings.autograd,
            "the forward pass differentiates inside itself: attacks do not see through an optimisation at inference"
            if findings.autograd
            else "the forward pass calls no autograd",
        ),
        "classes": Check(
            True if enough else None,
            f"{classes} classes, targeted losses reach {targets} other classes"
            if enough
            else f"{classes} classes, but the targeted difference-of-logits loss needs {_CLASSES_OF_DLR}: the fallback "
            f"is cross-entropy and the margin loss with {targets} target{'s' if targets > 1 else ''}, "
            "which is not the published ensemble, so nothing can be checked against that",
        ),
        "zero_radius": Check(
            not findings.moved_at_zero,
            f"with radius 0 the attacks change {findings.moved_at_zero:.0f} predictions of a batch"
            if findings.moved_at_zero
            else "with radius 0 every attack leaves the clean accuracy as it is",
        ),
    }
    idle = {}
    if not findings.radii:
        idle = {"zero_radius": "no attack of the evaluation has a radius"}
    if attacked == 0:
        idle |= dict.fromkeys(("budget", "gradient"), "no image was attacked")
    if classes == 0:
        idle |= dict.fromkeys(checks, "there was no image")
    return checks | {name: Check(None, reason) for name, reason in idle.items() if checks[name].passed is not False}
