"""From verdicts to checks: when is a robust accuracy not to be trusted?

All comparisons are between verdicts on the same images, so chance enters only through the paths that attacks take. A
difference is held against an evaluation if it exceeds the margin of its check and a sign test finds it larger than
chance: of the images on which two attacks differ, about half should then fall to either. A few hundred images thus
show a gap of some points, not one of a fifth of a point; the detail of a check says what was seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from robustdist.report.result import Check
from robustdist.report.text import eps_text, percent

__all__ = ["better_than_chance", "gradient", "larger_radius", "more_steps", "no_better", "one_step"]

# A stronger attack may be a little worse on a few images: it takes another path.
_RIPPLE = 0.01
# More steps and restarts may still lower an accuracy this much before it is called unfinished.
_UNFINISHED = 0.05
# What may be left at a radius at which every image can be turned into any other.
_NOTHING = 0.05
# AutoAttack's flag: a weaker attacker who does better than this shows that the gradient misleads.
_MISLED = 0.002
_NO_GRADIENT_SHARE = 0.01
# Catastrophic overfitting: one step leaves nearly all right, many steps nearly none.
_MOST, _FEW = 0.8, 0.02
# Odds at which a fair coin is given up: one in twenty.
_ONE_IN = 20


def better_than_chance(wins: int, losses: int) -> bool:
    """Return whether ``wins`` of ``wins + losses`` is too many for a fair coin (one-sided sign test, 5 %).

    Example:
        >>> better_than_chance(4, 0), better_than_chance(5, 0), better_than_chance(8, 3)
        (False, True, False)
    """
    total = wins + losses
    # in whole numbers: 2 ** total is no float for thousands of images
    tail, throws = 0, math.comb(total, wins)
    for count in range(wins, total + 1):
        tail += throws
        throws = throws * (total - count) // (count + 1)
    return bool(tail * _ONE_IN <= 2**total)


def _falls_short(stronger: Tensor, weaker: Tensor, margin: float) -> bool:
    """Return whether more images stay right under the ``stronger`` attack than under the ``weaker`` one."""
    spared, caught = int((stronger & ~weaker).sum()), int((weaker & ~stronger).sum())
    return spared - caught > margin * len(stronger) and better_than_chance(spared, caught)


def _percent(right: Tensor) -> str:
    return f"{percent(int(right.sum()) / max(1, len(right)))} %"


def gradient(attacked: int, without_margin: int, without_ce: int) -> Check:
    """Judge on how many images the margin loss and cross-entropy have no input gradient."""
    margin, ce = (100 * count / max(1, attacked) for count in (without_margin, without_ce))
    numbers = f"no input gradient of the margin on {margin:.1f} %, of cross-entropy on {ce:.1f} % of the images"
    if without_margin:
        return Check(False, f"{numbers}: something in the model stops gradients, such as rounding or saturation")
    if ce > 100 * _NO_GRADIENT_SHARE:
        return Check(False, f"{numbers}: the logits are so large that cross-entropy is blind, attack the margin")
    return Check(True, numbers)


def one_step(clean: Tensor, single: Tensor, many: Tensor, steps: int) -> Check:
    """Judge whether one step of the whole radius does worse than ``steps`` steps, as it must.

    Args:
        clean: Which images are right without attack, shape (images,), bool.
        single: The same under one step.
        many: The same under many steps.
        steps: How many.
    """
    numbers = f"right under one step {_percent(single)}, under {steps} steps {_percent(many)}"
    if _falls_short(many, single, _RIPPLE):
        return Check(False, f"{numbers}: many steps should do more harm, so their gradient is masked")
    if single.sum() >= _MOST * clean.sum() > 0 and many.sum() <= _FEW * clean.sum():
        return Check(False, f"{numbers}: catastrophic overfitting to one step, quote many steps only")
    return Check(True, numbers)


def larger_radius(curve: Sequence[tuple[float, Tensor]]) -> Check:
    """Judge whether accuracy falls with the radius, down to nothing.

    Args:
        curve: Radii in ascending order, and which images are right under each.
    """
    for (smaller, before), (larger, after) in itertools.pairwise(curve):
        if _falls_short(after, before, _RIPPLE):
            return Check(
                False,
                f"accuracy rises from {_percent(before)} at radius {eps_text(smaller)} to {_percent(after)} at "
                f"{eps_text(larger)}: the attack loses its way",
            )
    radius, last = curve[-1]
    left = f"{_percent(last)} stay right at radius {eps_text(radius)}"
    if last.sum() > _NOTHING * len(last):
        return Check(False, f"{left}, where all images can be made one and the same: the attack does not work")
    return Check(True, f"accuracy falls with the radius; {left}")


def more_steps(curve: Sequence[tuple[int, Tensor]], held: Tensor, strongest: Tensor) -> Check:
    """Judge whether accuracy falls with steps, and whether the evaluation had enough of steps and restarts.

    Args:
        curve: Steps in ascending order, and which images are right under each.
        held: Which images are right under the attacks of the evaluation.
        strongest: Which are right under these and also under most steps and most restarts.
    """
    for (fewer, before), (more, after) in itertools.pairwise(curve):
        if _falls_short(after, before, _RIPPLE):
            return Check(
                False,
                f"accuracy rises from {_percent(before)} with {fewer} steps to {_percent(after)} with {more}: "
                "the gradient misleads",
            )
    numbers = f"the evaluation leaves {_percent(held)} right, more steps and restarts {_percent(strongest)}"
    if _falls_short(held, strongest, _UNFINISHED):
        return Check(False, f"{numbers}: give its attacks more of them")
    return Check(True, numbers)


def no_better(attacker: str, outside: Tensor, held: Tensor, white_box: Tensor) -> Check:
    """Judge whether an attacker who sees the model from outside does better than those who see its gradients.

    Args:
        attacker: Its name.
        outside: Which images are right under it.
        held: Which are right under the attacks of the evaluation.
        white_box: Which are right under all attacks with gradients of this examination, and under those of the
            evaluation if none of them works without.
    """
    numbers = (
        f"{attacker} leaves {_percent(outside)} right, the evaluation {_percent(held)}, all attacks with gradients "
        f"{_percent(white_box)}"
    )
    if _falls_short(white_box, outside, _MISLED):
        return Check(False, f"{numbers}: who sees less should do less harm, so gradients mislead here")
    if _falls_short(held, outside, _UNFINISHED):
        return Check(False, f"{numbers}: the attacks of the evaluation are too weak for this model")
    return Check(True, numbers)
