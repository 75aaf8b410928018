"""When a falling accuracy is a collapse."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CollapseRule", "has_collapsed"]


def has_collapsed(accuracy: float, expected: float, *, drop: float = 0.5, fall: float = 0.1) -> bool:
    r"""Return whether ``accuracy`` is below ``(1 - drop) * expected`` and more than ``fall`` below ``expected``.

    The first condition is the rule; the second keeps it from firing on noise while accuracies are small.

    Example:
        >>> [has_collapsed(accuracy, expected=0.42) for accuracy in (0.40, 0.30, 0.05)]
        [False, False, True]
        >>> has_collapsed(0.02, expected=0.05)
        False
    """
    return accuracy < (1 - drop) * expected and expected - accuracy > fall


@dataclass
class CollapseRule:
    r"""Judges one check after another.

    With :math:`a` the accuracy under several steps at the full radius, and :math:`m` and :math:`o` those under several
    steps and under one at the radius in use, a check has collapsed if

    .. math:: a \ll \max a \quad \text{or} \quad
              \big( m \ll o \cdot \max \min(1, m / o) \; \text{and} \; a \le \max a + \text{fall} \big)

    where the maxima are over the earlier checks without a collapse and :math:`\ll` is :func:`has_collapsed`. The
    second condition compares at one radius, whatever it is: it holds while a radius grows, when :math:`m` may fall
    with good reason and :math:`a` has not risen yet. It is catastrophic overfitting by definition: what holds
    against one step no longer holds against several. Where :math:`a` has clearly risen, one step has only run ahead.

    Attributes:
        drop: Share of the expected accuracy that must be lost.
        fall: Accuracy that must be lost besides.
        best: The largest :math:`a` so far.
        best_ratio: The largest :math:`\min(1, m / o)` so far, of checks with :math:`o` above ``fall``.
    """

    drop: float = 0.5
    fall: float = 0.1
    best: float = 0.0
    best_ratio: float = 0.0

    def judge(self, full: float, multi_step: float, one_step: float) -> bool:
        """Return whether the check with these accuracies has collapsed; remember it if not."""
        collapsed = has_collapsed(full, self.best, drop=self.drop, fall=self.fall) or (
            full <= self.best + self.fall
            and has_collapsed(multi_step, self.best_ratio * one_step, drop=self.drop, fall=self.fall)
        )
        if not collapsed:
            self.best = max(self.best, full)
            if one_step > self.fall:
                self.best_ratio = max(self.best_ratio, min(1.0, multi_step / one_step))
        return collapsed
