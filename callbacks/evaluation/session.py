"""One evaluation from its first batch to its result: count, write a journal, examine, save examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from robustdist._lightning import LightningModule, Trainer, rank_zero_info
from robustdist.attacks.base import Attack
from robustdist.callbacks.evaluation.setup import attack_context
from robustdist.core.batch import BatchAdapter
from robustdist.core.forward import Forward, bind_forward
from robustdist.core.ranks import gathered
from robustdist.core.sharding import fingerprint, flatten_loaders
from robustdist.core.space import Space
from robustdist.diagnostics import examine, not_run, with_diagnosis
from robustdist.diagnostics.collect import Collector
from robustdist.evaluation.counter import BatchCounter
from robustdist.evaluation.identity import attacks_hash, code_text, model_hash
from robustdist.evaluation.journal import Journal
from robustdist.evaluation.saved import agrees, remeasure, save_examples
from robustdist.evaluation.tally import RobustTally
from robustdist.report import EvaluationResult, Examples, SavedScore

__all__ = ["EvaluationSession", "SessionOptions"]


@dataclass
class SessionOptions:
    """The arguments of a RobustEvaluation that decide what is measured."""

    attacks: dict[str, Attack]
    num_examples: int
    max_samples: int | None
    adapter: BatchAdapter
    forward: Forward
    space: Space
    report_dir: str | None
    resume: bool
    save_examples: bool
    thorough: bool
    check_samples: int
    surrogate: nn.Module | None


class EvaluationSession:
    """Made by all processes at the start of an evaluation loop.

    Args:
        trainer: The Trainer.
        pl_module: The module to judge.
        loaders: Its loaders.
        options: What to measure.
        final: Whether this is an evaluation of its own and not one of many in fit: only then there is a journal,
            saved examples and an examination.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, loaders: Any, options: SessionOptions, *, final: bool
    ) -> None:
        self.options = options
        self.final = final
        self.journal = self._journal(trainer, pl_module, loaders) if final else None
        self.counter = BatchCounter(
            RobustTally(options.attacks, options.num_examples, self.journal),
            loaders,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            gather=gathered,
            adapter=options.adapter,
            forward=options.forward,
            max_samples=options.max_samples,
            space=options.space,
        )
        if self.journal is not None and self.journal.message is not None:
            rank_zero_info(self.journal.message)
        self._collector: Collector | None = None
        if final and options.thorough and options.space.has_pictures:
            lengths = [_length(loader) for loader in flatten_loaders(loaders)]
            self._collector = Collector(lengths, options.max_samples, options.check_samples)
            self.counter.watch = self._collector.keep

    def _journal(self, trainer: Trainer, pl_module: LightningModule, loaders: Any) -> Journal | None:
        options = self.options
        if options.report_dir is None or not (options.resume or options.save_examples):
            return None
        prints = gathered([fingerprint(loader) if _length(loader) else 0 for loader in flatten_loaders(loaders)])
        key = {
            "weights": model_hash(pl_module),
            "attacks": attacks_hash(options.attacks),
            "data": repr(sorted({tuple(one) for one in prints})),
            "seed": repr([attack.seed for attack in options.attacks.values()]),
            "precision": str(trainer.precision),
            "forward": code_text(options.forward) if callable(options.forward) else repr(options.forward),
            "space": repr(sorted((name, repr(value)) for name, value in vars(options.space).items())),
        }
        return Journal(
            Path(options.report_dir) / "progress",
            key,
            trainer.global_rank,
            gathered,
            resume=options.resume,
            save_images=options.save_examples,
        )

    def finish(self, trainer: Trainer, pl_module: LightningModule) -> tuple[EvaluationResult, Examples | None]:
        """Combine what all processes found; a collective."""
        options, tally = self.options, self.counter.tally
        tally.reduce(gathered)
        result = tally.result()
        if options.report_dir is not None:
            result = replace(result, model_hash=model_hash(pl_module))
        if self._collector is None:
            reason = "it runs attacks of its own: set thorough=True, or use robustdist evaluate"
            if options.thorough and self.final:
                reason = "its attacks know inputs, not embeddings"
            result = replace(result, checks={**result.checks, **not_run(reason)})
        else:
            place = trainer.global_rank, trainer.world_size
            with attack_context(trainer, pl_module.device):
                subset = self._collector.subset(pl_module, tally.records, options.attacks, *place, gathered)
                found = examine(subset, options.attacks, gathered, options.surrogate)
            result = with_diagnosis(result, found)
        if self.journal is not None:
            if options.save_examples:
                result = self._save(self.journal, trainer, pl_module, result)
            self.journal.close()
        return result, tally.examples

    def _save(
        self, journal: Journal, trainer: Trainer, pl_module: LightningModule, result: EvaluationResult
    ) -> EvaluationResult:
        """Write the examples, on rank zero, and measure them again."""
        assert self.options.report_dir is not None
        parts = journal.image_files()
        saved: SavedScore | None = None
        if trainer.is_global_zero and parts:
            units = next(iter(self.options.attacks.values()))
            counted = map(tuple, self.counter.tally.records.table[:, :2].tolist())
            path = save_examples(Path(self.options.report_dir), parts, units.bounds, counted)
            alone = not callable(self.options.forward)  # a function may read more of a batch than was saved
            with attack_context(trainer, pl_module.device):
                saved = remeasure(
                    pl_module,
                    path,
                    forward=bind_forward(pl_module, self.options.forward, None) if alone else None,
                    mean=units.mean,
                    std=units.std,
                    dtype=self.counter.dtype,
                    device=pl_module.device,
                    measure=alone,
                )
        saved = gathered(saved)[0]
        if saved is None:
            return result
        return replace(result, saved=saved, checks={**result.checks, "saved_examples": agrees(saved, result)})

    def reported(self) -> None:
        """Remove the journal: the report is there. On rank zero."""
        if self.journal is not None:
            self.journal.remove()


def _length(loader: Any) -> int | None:
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None
    try:
        return len(dataset)
    except TypeError:
        return None
