"""Count clean and robust samples batch by batch, with or without a Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.attacks.losses import check_class_indices
from robustdist.core.forward import guarded_logits, looks_like_probabilities
from robustdist.core.rng import Noise
from robustdist.errors import UsageError
from robustdist.evaluation.findings import Findings, cheap_checks, excess
from robustdist.evaluation.forwards import calls_autograd, repeat_forward
from robustdist.evaluation.journal import Journal
from robustdist.evaluation.records import Records
from robustdist.report.result import AttackScore, EvaluationResult, Examples

__all__ = ["RobustTally"]

# Share of the largest logit by which the way to pixel units and back may change the lead of a class.
_ROUNDING = 1e-2


class RobustTally:
    """Clean and robust counts of a module.

    A sample is robust when it is right without attack and under every attack. Samples that are wrong already are not
    attacked. The random start of a sample depends on its id alone.

    Args:
        attacks: Attacks by name, at least one.
        num_examples: How many samples to keep for the eye.
        journal: Where finished samples are written down and found again; None for an evaluation in one go.

    Attributes:
        records: One row per image: label, prediction, and what each attack did.
        findings: What the evaluation found out about itself.

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

    def __init__(self, attacks: Mapping[str, Attack], num_examples: int = 0, journal: Journal | None = None) -> None:
        if not attacks:
            raise UsageError("attacks is empty: give at least one, for example {'pgd20': PGD(steps=20)}")
        self.attacks = dict(attacks)
        self.num_examples = num_examples
        self.records = Records({name: _stages(attack) for name, attack in self.attacks.items()})
        self.findings = Findings()
        self.precision: str | None = None
        self.journal = journal
        self._seconds = dict.fromkeys(self.attacks, 0.0)
        self._examples: list[tuple[Tensor, Tensor, int, int, int]] = []
        self._looked_at_forward = False
        if journal is not None:
            journal.open(self.records.columns)
            self.findings.merge([journal.findings])
            self._examples = journal.examples()

    def update(
        self,
        module: nn.Module,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Any,
        sample_ids: Sequence[int | None],
        *,
        loader: int = 0,
        whole_batch: bool = False,
    ) -> None:
        """Attack one batch and count.

        Args:
            module: The module to leave as it was.
            forward: Maps inputs to logits.
            x: Inputs, shape (batch, ...).
            y: Class indices, shape (batch,).
            sample_ids: Place of each row in the data set; None for a row that another process counts.
            loader: Which of several data sets the ids belong to.
            whole_batch: Attack all rows together, because ``forward`` reads the rest of the batch too.

        Raises:
            UsageError: If the inputs or targets do not fit the attacks.
        """
        logits = self.check(module, forward, x, y)
        self._look_at_forward(module, forward, x, y, logits)
        counted = torch.tensor([sample_id is not None for sample_id in sample_ids], dtype=torch.bool)
        rows = self.records.new_rows(len(x))
        rows[:, 0] = loader
        rows[:, 1] = torch.tensor([-1 if sample_id is None else sample_id for sample_id in sample_ids])
        rows[:, self.records.place("label")] = y.cpu()
        rows[:, self.records.place("prediction")] = logits.argmax(1).cpu()
        pending = counted
        if self.journal is not None:
            rows, known = self.journal.look_up(rows, x, y)
            self.records.add(rows[known & counted])
            pending = counted & ~known
        if not pending.any():
            return
        worst, shown = self._attack(module, forward, x, y, rows, pending, whole_batch)
        kept = rows[pending]
        self.records.add(kept)
        self._keep_examples(x, worst, rows, shown, pending)
        if self.journal is not None:
            pixels = next(iter(self.attacks.values())).to_pixels(worst[pending.to(x.device)])
            self.journal.write(kept, self.findings, self._seconds, self._examples, pixels)

    def _attack(
        self,
        module: nn.Module,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        pending: Tensor,
        whole_batch: bool,
    ) -> tuple[Tensor, Tensor]:
        """Fill ``rows`` in; return the images after the attack that fooled the model and what it takes them for."""
        mask = getattr(forward, "mask", None)  # only views of sequences have one, and those are attacked whole
        correct = (rows[:, self.records.place("label")] == rows[:, self.records.place("prediction")]) & pending
        chosen = torch.arange(len(x)) if whole_batch else correct.nonzero()[:, 0]
        ids = rows[chosen, 1].tolist()
        on_device = chosen.to(x.device)
        worst, shown = x.detach().clone(), rows[:, self.records.place("prediction")].clone()
        robust = correct.clone()
        for place, (name, attack) in enumerate(self.attacks.items()):
            start = _now(x.device)
            held = correct.clone()
            if len(chosen):
                found = attack.run(
                    module, x[on_device], y[on_device], forward=forward, sample_ids=ids, rowwise=not whole_batch
                )
                prediction = guarded_logits(module, forward, found.x_adv).argmax(1).cpu()
                held[chosen] &= prediction == rows[chosen, self.records.place("label")]
                attacked = correct[chosen]
                self.findings.excess = max(self.findings.excess, excess(attack, found.x_adv, x[on_device], mask))
                rows[chosen, self.records.place(name, "blind")] = (found.no_gradient.cpu() & attacked).long()
                if found.stage is not None:
                    broken = attacked & ~held[chosen]
                    rows[chosen[broken], self.records.place(name, "stage")] = found.stage.cpu()[broken]
                # the panel shows the first attack that fooled the model, or the first attack of all
                fooled = robust[chosen] & ~held[chosen]
                show = fooled if place else torch.ones_like(fooled)
                worst[on_device[show.to(x.device)]] = found.x_adv[show.to(x.device)]
                shown[chosen[show]] = prediction[show]
            robust &= held
            rows[:, self.records.place(name, "held")] = held.long()
            self._seconds[name] += _now(x.device) - start
        return worst, shown

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

    def _look_at_forward(
        self, module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor, y: Tensor, logits: Tensor
    ) -> None:
        """Find out about the forward pass what one batch can tell."""
        if self._looked_at_forward or len(x) == 0:
            return
        self._looked_at_forward = True
        self.precision = str(x.dtype).removeprefix("torch.")
        repeated = repeat_forward(module, forward, x)
        moved = radii = 0
        for attack in self.attacks.values():
            if attack.radius is not None:
                radii += 1
                # what an attack attacks, in its units and number format, is the model that is judged
                problem = attack.problem(forward, x, y, Noise(attack.seed))
                attacked = guarded_logits(module, problem.logits, problem.x)
                moved += int(_clearly_changed(logits, attacked).sum())
        self.findings.merge(
            [
                Findings(
                    probabilities=float(looks_like_probabilities(logits)),
                    spread=repeated.spread,
                    changed=repeated.num_changed,
                    autograd=float(calls_autograd(module, forward, x)),
                    num_classes=logits.shape[1],
                    moved_at_zero=moved,
                    radii=radii,
                )
            ]
        )

    def mark_uncertain(self) -> None:
        """Note that padded samples could not be told from real ones."""
        self.findings.uncertain = 1.0

    def reduce(self, gather: Callable[[Any], list[Any]]) -> None:
        """Combine what all processes counted; ``gather(value)`` returns the value of every process, in one order."""
        everyone = gather((self.records.table, self.findings, self._seconds, self.precision))
        self.records.merge(table for table, *_ in everyone)
        self.findings.merge([findings for _, findings, *_ in everyone])
        self._seconds = {name: max(seconds[name] for _, _, seconds, _ in everyone) for name in self.attacks}
        self.precision = next((precision for *_, precision in everyone if precision is not None), None)

    @property
    def examples(self) -> Examples | None:
        """The samples kept for the eye, or None."""
        if not self._examples:
            return None
        x, x_adv, y, predicted, predicted_adv = zip(*self._examples, strict=True)
        return Examples(torch.stack(x), torch.stack(x_adv), list(y), list(predicted), list(predicted_adv))

    def result(self) -> EvaluationResult:
        """Return what was counted so far."""
        earlier = {} if self.journal is None else self.journal.earlier_seconds
        scores = {
            name: AttackScore(
                num_robust=int(self.records.held(name).sum()),
                seconds=self._seconds[name] + earlier.get(name, 0.0),
                settings=attack.settings(),
            )
            for name, attack in self.attacks.items()
        }
        return EvaluationResult(
            num_samples=len(self.records),
            num_clean=int(self.records.clean.sum()),
            num_robust=int(self.records.robust.sum()),
            attacks=scores,
            threat_model=_threat_model(list(self.attacks.values())),
            checks=cheap_checks(self.records, self.findings),
            seed=next(iter(self.attacks.values())).seed,
            classes=self.records.classes(),
            loaders=self.records.loaders(),
            waterfall=self.records.waterfall(),
            precision=self.precision,
        )

    def _keep_examples(self, x: Tensor, x_adv: Tensor, rows: Tensor, shown: Tensor, pending: Tensor) -> None:
        first = next(iter(self.attacks.values()))
        label, prediction = (self.records.place(name) for name in ("label", "prediction"))
        for row in pending.nonzero()[:, 0].tolist()[: max(0, self.num_examples - len(self._examples))]:
            clean, adversarial = (first.to_pixels(image[row : row + 1])[0].cpu() for image in (x, x_adv))
            self._examples.append(
                (clean, adversarial, int(rows[row, label]), int(rows[row, prediction]), int(shown[row]))
            )


def _stages(attack: Attack) -> Sequence[str]:
    return tuple(attack.stages)


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


def _clearly_changed(before: Tensor, after: Tensor) -> Tensor:
    """Return which rows have another prediction by more than the rounding of inputs and logits explains."""
    first = before.argmax(1, keepdim=True)
    lead = (after.amax(1, keepdim=True) - after.gather(1, first))[:, 0]
    return lead > _ROUNDING * after.abs().amax(1)
