"""Count clean and robust samples batch by batch, with or without a Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.attacks.functional import distance
from robustdist.attacks.losses import check_class_indices
from robustdist.core.forward import guarded_logits, looks_like_probabilities
from robustdist.errors import UsageError
from robustdist.report.result import AttackScore, Check, EvaluationResult, Examples

__all__ = ["RobustTally"]

# Rounding by which a perturbation may exceed its radius, relative to the pixel range.
_BUDGET_SLACK = 1e-6
# The same for a sum over many pixels, relative to the radius: float32 cannot do better on large images.
_L1_ROUNDING = 1e-4
# Share of attacked samples without an input gradient above which the evaluation is not to be trusted.
_NO_GRADIENT_SHARE = 0.01


class RobustTally:
    """Clean and robust counts of a module.

    A sample is robust when it is right without attack and under every attack. Samples that are wrong already are not
    attacked. The random start of a sample depends on its id alone.

    Args:
        attacks: Attacks by name, at least one.
        num_examples: How many samples to keep for the eye.

    Raises:
        UsageError: If there are no attacks.

    Example:
        >>> from robustdist.attacks import PGD
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> tally = RobustTally({"pgd": PGD(eps=0.0, steps=1)})
        >>> tally.update(model, model, torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0]), [0, 1, 2])
        >>> tally.result().num_samples
        3
    """

    def __init__(self, attacks: Mapping[str, Attack], num_examples: int = 0) -> None:
        if not attacks:
            raise UsageError("attacks is empty: give at least one, for example {'pgd20': PGD(steps=20)}")
        self.attacks = dict(attacks)
        self.num_examples = num_examples
        # one integer tensor to sum over processes: samples, clean, robust, attacked, without gradient, per attack
        self.counts = torch.zeros(5 + len(self.attacks), dtype=torch.int64)
        # one tensor to take the maximum of: excess over the budget, probabilities, changing outputs, uncertain
        # sharding, seconds per attack
        self.maxima = torch.zeros(4 + len(self.attacks))
        self._examples: list[tuple[Tensor, Tensor, int, int, int]] = []

    def update(
        self,
        module: nn.Module,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Any,
        sample_ids: Sequence[int | None],
        *,
        whole_batch: bool = False,
    ) -> None:
        """Attack one batch and count.

        Args:
            module: The module to leave as it was.
            forward: Maps inputs to logits.
            x: Inputs, shape (batch, ...).
            y: Class indices, shape (batch,).
            sample_ids: Place of each row in the data set; None for a row that another process counts.
            whole_batch: Attack all rows together, because ``forward`` reads the rest of the batch too.

        Raises:
            UsageError: If the inputs or targets do not fit the attacks.
        """
        logits = self.check(module, forward, x, y)
        if self.counts[0] == 0:
            self.maxima[1] = float(looks_like_probabilities(logits))
            # another seed: with the same one even a forward that draws random numbers would repeat itself
            self.maxima[2] = float(not torch.equal(guarded_logits(module, forward, x, seed=1), logits))
        counted = torch.tensor([sample_id is not None for sample_id in sample_ids], dtype=torch.bool, device=x.device)
        ids = [-1 if sample_id is None else sample_id for sample_id in sample_ids]
        correct = (logits.argmax(1) == y) & counted
        robust = correct.clone()
        rows = torch.arange(len(x), device=x.device) if whole_batch else correct.nonzero()[:, 0]
        row_ids = [ids[row] for row in rows.tolist()]
        worst, worst_prediction = x.detach().clone(), logits.argmax(1)
        for place, attack in enumerate(self.attacks.values()):
            start = _now(x.device)
            held = correct.clone()
            if len(rows):
                found = attack.run(module, x[rows], y[rows], forward=forward, sample_ids=row_ids)
                prediction = guarded_logits(module, forward, found.x_adv).argmax(1)
                held[rows] &= prediction == y[rows]
                self._check_budget(attack, found.x_adv, x[rows])
                attacked = correct[rows]
                self.counts[3] += int(attacked.sum())
                self.counts[4] += int((found.no_gradient & attacked).sum())
                # the panel shows the first attack that fooled the model, or the first attack of all
                fooled = robust[rows] & ~held[rows]
                shown = fooled if place else torch.ones_like(fooled)
                worst[rows[shown]], worst_prediction[rows[shown]] = found.x_adv[shown], prediction[shown]
            robust &= held
            self.counts[5 + place] += int(held.sum())
            self.maxima[4 + place] += _now(x.device) - start
        self.counts[:3] += torch.tensor([int(counted.sum()), int(correct.sum()), int(robust.sum())])
        self._keep_examples(x, worst, y, logits.argmax(1), worst_prediction, counted)

    def check(self, module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor, y: Any) -> Tensor:
        """Return the logits of ``x`` if inputs and targets fit the attacks; arguments as in :meth:`update`.

        Raises:
            UsageError: If they do not.
        """
        for attack in self.attacks.values():
            attack.check_inputs(x)
        logits = guarded_logits(module, forward, x)
        check_class_indices(logits, y, remedy="robust accuracy is about classification, evaluate other tasks yourself")
        return logits

    def mark_uncertain(self) -> None:
        """Note that padded samples could not be told from real ones."""
        self.maxima[3] = 1.0

    def reduce(self, reduce: Callable[[Tensor, str], Tensor]) -> None:
        """Combine the counts of all processes; ``reduce(tensor, op)`` does "sum" or "max"."""
        self.counts = reduce(self.counts, "sum")
        self.maxima = reduce(self.maxima, "max")

    @property
    def examples(self) -> Examples | None:
        """The samples kept for the eye, or None."""
        if not self._examples:
            return None
        x, x_adv, y, predicted, predicted_adv = zip(*self._examples, strict=True)
        return Examples(torch.stack(x), torch.stack(x_adv), list(y), list(predicted), list(predicted_adv))

    def result(self) -> EvaluationResult:
        """Return what was counted so far."""
        counts, maxima = self.counts.tolist(), self.maxima.tolist()
        scores = {
            name: AttackScore(num_robust=counts[5 + place], seconds=maxima[4 + place], settings=attack.settings())
            for place, (name, attack) in enumerate(self.attacks.items())
        }
        return EvaluationResult(
            num_samples=counts[0],
            num_clean=counts[1],
            num_robust=counts[2],
            attacks=scores,
            threat_model=_threat_model(list(self.attacks.values())),
            checks=self._checks(counts, maxima),
            seed=next(iter(self.attacks.values())).seed,
        )

    def _checks(self, counts: list[int], maxima: list[float]) -> dict[str, Check]:
        attacked, without = counts[3], counts[4]
        share = without / max(1, attacked)
        return {
            "budget": Check(
                maxima[0] <= _BUDGET_SLACK, f"largest excess over the radius or the pixel range: {maxima[0]:.1e}"
            ),
            "gradient": Check(
                share <= _NO_GRADIENT_SHARE, f"{share:.1%} of the attacked images had no input gradient to follow"
            ),
            "logits": Check(maxima[1] == 0, "the model returns " + ("probabilities" if maxima[1] else "logits")),
            "deterministic": Check(
                maxima[2] == 0, "two forward passes of one batch " + ("differ" if maxima[2] else "agree")
            ),
            "counted_once": Check(
                maxima[3] == 0,
                "the sampler is unknown: padded samples may be counted twice"
                if maxima[3]
                else f"{counts[0]} samples, each counted once over all processes",
            ),
        }

    def _check_budget(self, attack: Attack, x_adv: Tensor, x: Tensor) -> None:
        adversarial, clean = attack.to_pixels(x_adv), attack.to_pixels(x)
        span = 1.0 if attack.bounds is None else attack.bounds[1] - attack.bounds[0]
        excess = 0.0
        if attack.radius is not None:
            radius = attack.eps * (1 + _L1_ROUNDING) if attack.norm == "l1" else attack.eps
            excess = float(distance(adversarial, clean, attack.norm).max()) - radius
        if attack.bounds is not None:
            low, high = (float(value) for value in torch.aminmax(adversarial))
            # a white pixel normalised in half precision lies a little outside already
            allowed_low, allowed_high = (float(value) for value in torch.aminmax(clean))
            excess = max(excess, min(attack.bounds[0], allowed_low) - low, high - max(attack.bounds[1], allowed_high))
        # a non-finite image has broken every budget
        finite = bool(torch.isfinite(adversarial).all())
        self.maxima[0] = max(float(self.maxima[0]), excess / span) if finite else float("inf")

    def _keep_examples(
        self, x: Tensor, x_adv: Tensor, y: Tensor, predicted: Tensor, predicted_adv: Tensor, counted: Tensor
    ) -> None:
        first = next(iter(self.attacks.values()))
        for row in counted.nonzero()[:, 0].tolist()[: max(0, self.num_examples - len(self._examples))]:
            clean, adversarial = (first.to_pixels(image[row : row + 1])[0].cpu() for image in (x, x_adv))
            self._examples.append((clean, adversarial, int(y[row]), int(predicted[row]), int(predicted_adv[row])))


def _threat_model(attacks: Sequence[Attack]) -> dict[str, Any]:
    models = {(attack.norm, attack.radius, attack.bounds) for attack in attacks}
    if len(models) > 1:
        return {"norm": "mixed", "eps": None, "bounds": None}
    norm, eps, bounds = models.pop()
    return {"norm": norm, "eps": eps, "bounds": None if bounds is None else list(bounds)}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
