"""Structured pruning while a module is trained: units masked by schedule, then really removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from robustdist.callbacks.progress import Progress
from robustdist.callbacks.pruning.example import example_of, forward_of
from robustdist.callbacks.pruning.files import follow_checkpoints, release_checkpoints
from robustdist.callbacks.pruning.learning import LEARNED, LearningPhase
from robustdist.callbacks.pruning.masking import Masking
from robustdist.callbacks.pruning.norms import Recalibration
from robustdist.callbacks.pruning.options import Removal, check_pruning_options, looked_for
from robustdist.callbacks.pruning.report import FinalReport
from robustdist.callbacks.pruning.scoring import Scoring
from robustdist.callbacks.pruning.surgery import (
    averaged_modules,
    check_all_can_follow,
    check_optimizers_can_follow,
    cut_in_fit,
)
from robustdist.callbacks.pruning.teacher import Teacher
from robustdist.core.compiled import check_copies_are_their_own
from robustdist.core.forward import Forward
from robustdist.core.ranks import failing_together
from robustdist.core.redirect import check_module_can_be_called
from robustdist.core.snapshot import on_cpu
from robustdist.errors import RobustDistWarning
from robustdist.pruning import PruningRecipe, UnitGroup, compile_recipe, discover
from robustdist.pruning.cost import CostModel
from robustdist.pruning.example import with_rows
from robustdist.pruning.groups import Kind
from robustdist.pruning.importance import Criterion, make_criterion, named_tensors
from robustdist.pruning.latency import latency_after
from robustdist.pruning.loading import note_recipe
from robustdist.pruning.plan import chosen_groups
from robustdist.pruning.schedule import PruningSchedule
from robustdist.pruning.selection import Removed, Target, select

__all__ = ["StructuredPruning"]


class StructuredPruning(Callback):
    """Makes an unmodified module smaller while it is trained: channels, heads, FFN units really removed.

    Coupled units are found at the first batch. As ``schedule`` says, the least important ones are held at zero, with
    their gradients and moments, in all layers that make or read them; at its end they are cut out of the tensors, and
    training goes on with the small module, under the same optimisers, whose state is cut alike. Scores come from the
    gradients of training, so under :class:`AdversarialTraining` they are those of the robust loss, and they are taken
    after the reduction over processes, so all remove the same units; a hash is compared.

    Checkpoints before the removal have the shapes of the dense module and load into it as usual; later ones load with
    :func:`robustdist.pruning.load_pruned`, which needs neither this callback nor torch-pruning. A resumed training
    gets its structure from the checkpoint before the weights are loaded. After the removal
    ``pl_module.pruning_recipe`` is the :class:`~robustdist.pruning.PruningRecipe`. Another fit prunes a pruned module
    further, by the target in terms of its present size; the recipe is then that of both.

    Args:
        target: What is left: ``{"macs": 0.5}``, ``{"params": 0.5}`` or ``{"width": 0.5}`` (shares in (0, 1]), or the
            width of every layer and the number of layers, ``{"heads": 6, "ffn": 768, "layers": 4}``.
        method: Scores: ``taylor``, ``magnitude``, ``bn_scale``, ``movement``, ``random``; or masks learned with
            gates until the end of the schedule: ``l0`` (hard concrete, warns if they learn too little), ``hydra``
            (scores under the loss of training, weights wait meanwhile).
        schedule: ``{"kind": "one_shot" | "iterative" | "cubic", "start": 0.1, "end": 0.6}``, shares of the training;
            default one_shot at 0.1.
        kinds: Which kinds of units may go: ``channels``, ``heads``, ``ffn``, ``hidden``.
        ignore: Patterns of names of groups (see ``robustdist plan``) and of untraceable parts that stay whole.
        round_to: Widths are multiples of it where there are more units.
        uniform: Keep the same share in every layer, instead of one threshold for all.
        min_units: Units that stay in every group; exact widths go before it.
        removal: ``scheduled``, or ``never`` to leave the units masked: checkpoints keep the dense shapes.
        bn_recalibration_batches: After the removal, batch norms take the plain average of the statistics of so many
            training batches in place of a moving one, which remembers the dense network.
        distill: Weight w in [0, 1] of the dense module as a teacher: the loss becomes
            (1 - w) loss + w T^2 KL(teacher || student), on the batch that the step sees, attacked or not. Twice the
            forward cost, and the teacher's weights in every checkpoint.
        distill_temperature: T.
        forward: What gives the logits, as in :class:`AdversarialTraining`; default the module itself.
        input_key: Where the input stands in a batch, if it cannot be told.
        seed: Seed of ``random``.
        method_options: Further arguments of the criterion, for example ``{"p": 1}`` for ``magnitude``.
        report: At the end of the fit, measure and print widths, sizes, CPU times and accuracies, dense and small.
        report_dir: Folder for the same as JSON and for a picture of the schedule.

    Raises:
        UsageError: For options out of range; at the start of fit for strategies with sharded weights, for start methods
            after which the main process cannot load the small module, and for models with nothing to remove.

    Example:
        >>> StructuredPruning(target={"macs": 0.5}, method="magnitude").target
        Target(name='macs', value=0.5, shape={})
    """

    def __init__(
        self,
        target: Mapping[str, float | int | str],
        method: str = "taylor",
        *,
        schedule: Mapping[str, Any] | None = None,
        kinds: Sequence[Kind] = ("channels", "heads", "ffn"),
        ignore: Sequence[str] = (),
        round_to: int = 8,
        uniform: bool = False,
        min_units: int = 1,
        removal: Removal = "scheduled",
        bn_recalibration_batches: int = 50,
        distill: float = 0.0,
        distill_temperature: float = 2.0,
        forward: Forward = None,
        input_key: str | int | None = None,
        seed: int = 0,
        method_options: Mapping[str, Any] | None = None,
        report: bool = True,
        report_dir: str | None = None,
    ) -> None:
        self.target = Target.parse(target)
        check_pruning_options(
            target=self.target,
            method=method,
            kinds=kinds,
            ignore=ignore,
            removal=removal,
            round_to=round_to,
            bn_recalibration_batches=bn_recalibration_batches,
            distill=distill,
            forward=forward,
        )
        self.method = method
        self.schedule = PruningSchedule.parse(schedule)
        self.kinds = looked_for(kinds, self.target)
        self.ignore = tuple(ignore)
        self.round_to = round_to
        self.uniform = uniform
        self.min_units = min_units
        self.removal = removal
        self.bn_recalibration_batches = bn_recalibration_batches
        self.forward = forward
        self.input_key = input_key
        options = dict(method_options or {})
        self._options = {"seed": seed, **options} if method == "random" else options
        self.seed = seed
        #: None with methods that learn masks.
        self.criterion = self._make_criterion()
        self.groups: list[UnitGroup] = []
        self.removed: Removed = {}
        self._way = 0.0
        self._cut = False
        self._cost: CostModel | None = None
        self._latency: Callable[[Mapping[str, Sequence[int]]], float] | None = None
        self._masks: Masking | None = None
        self._scoring: Scoring | None = None
        self._learning: LearningPhase | None = None
        self._learned: dict[str, Any] = {}
        self._progress = Progress()
        self._seen_steps = 0
        self._tensors: dict[str, Tensor] = {}
        self._recalibration = Recalibration(bn_recalibration_batches)
        self._teacher = Teacher(distill, distill_temperature, forward if isinstance(forward, str) else "")
        self._report = FinalReport(report, report_dir)

    # --- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the combination; see to it that a pruned checkpoint finds its structure before its weights."""
        if stage == "fit":
            with failing_together():
                check_module_can_be_called(trainer.strategy, "StructuredPruning")
                check_copies_are_their_own(pl_module, "StructuredPruning")
                if self.removal == "scheduled":
                    check_all_can_follow(trainer)
                self._teacher.enrol(trainer, pl_module)
            self._forget()
            self._report.begin(pl_module)
        follow_checkpoints(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count executed optimiser steps."""
        self._teacher.begin(pl_module)
        self._progress.start(trainer, pl_module, "StructuredPruning(schedule)")
        self._seen_steps = self._progress.num_steps
        self._recalibration.attach(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Find the groups at the first batch; set learned masks."""
        self._report.see(pl_module, batch, self.input_key)
        if not self.groups and not self._cut:
            self._begin(trainer, pl_module, batch)
        self._recalibration.before_batch(trainer, pl_module)
        if self._learning is not None:
            self._learning.before_batch(self._progress.num_steps)
        if self._scoring is not None:
            self._scoring.before_batch(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fix learned masks, without chance."""
        if self._learning is not None:
            self._learning.before_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note accuracies for the report."""
        phase = "small" if self._cut else "masked" if self.removed else "dense"
        self._report.evaluated(trainer, self._progress.num_steps, phase)

    def _begin(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        with failing_together():
            example = example_of(pl_module, batch, self.input_key)
            forward = forward_of(self.forward)
            notes: dict[str, str] = {}
            options: Any = {"kinds": self.kinds, "ignore": self.ignore, "refused": notes}
            groups = chosen_groups(discover(pl_module, example, forward=forward, **options), self.ignore, notes)
            self._tensors = named_tensors(pl_module)
            self._cost = CostModel(pl_module, groups, lambda: forward(pl_module, with_rows(example, 1)))
            if self.target.name == "latency_ms":
                one = on_cpu(with_rows(example, 1))
                self._latency = latency_after(pl_module, groups, lambda module: forward(module, one))
            # what cannot be scored or reached is refused before anything is trained
            trial = {group.name: torch.zeros(group.size) for group in groups}
            if self.criterion is not None and not self.criterion.needs_gradients:
                trial = {group.name: self.criterion.score(group, self._tensors) for group in groups}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RobustDistWarning)  # of sizes that other scores come closer to
                self._select(trial, 1.0, groups)
            self.groups = groups
            check_optimizers_can_follow(trainer)
            if self.criterion is None:
                self._learn(trainer, pl_module)
            elif self.criterion.needs_gradients:
                self._scoring = Scoring(self.criterion, pl_module, groups, self._tensors)
        if self.removed:
            self._mask(trainer, pl_module)
        self._after_step(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Score the units by the gradients of this step; those of masked units are zero."""
        if self._cut or not self.groups:
            return
        if self._masks is not None:
            self._masks.before_step()
        if self._learning is not None:
            self._learning.before_step(trainer, optimizer)
        elif self._scoring is not None:
            self._scoring.before_step(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an executed step: hold masked units at zero, mask more, or cut them out."""
        self._progress.end_batch(pl_module)
        self._recalibration.count(trainer, pl_module)
        if self._progress.num_steps == self._seen_steps or self._cut:
            return
        if self._learning is not None:
            self._learning.after_step(self._seen_steps)
            pl_module.log_dict(self._learning.logs())
        self._seen_steps = self._progress.num_steps
        if self._masks is not None:
            self._masks.after_step(trainer)
        self._after_step(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cut what is still only masked; say so if training was too short for the schedule."""
        if self.groups and not self._cut and self.removal != "never":
            if self._way < 1:
                rank_zero_warn(
                    "training ended before schedule.end: what was to go is removed now, without tuning, and only "
                    "checkpoints made from here on are small",
                    category=RobustDistWarning,
                )
                self._choose(trainer, pl_module, 1.0)
            self._remove(trainer, pl_module)
        if self._cut:
            self._report.finish(trainer, pl_module, self.forward, method=self.method, target=self.target)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing of ours on the module but its recipe."""
        self._release(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing of ours on the module but its recipe."""
        self._release(pl_module)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return scores, masked units and progress."""
        return {
            "method": self.method,
            "target": str(self.target),
            "criterion": {} if self.criterion is None else self.criterion.state_dict(),
            "learned": self._learned if self._learning is None else self._learning.state_dict(),
            "removed": {name: list(units) for name, units in self.removed.items()},
            "way": self._way,
            "cut": self._cut,
            "teacher": self._teacher.state_dict(),
            "teacher_structure": self._teacher.structure(),
            "recalibration": self._recalibration.state_dict(),
            "report": self._report.state_dict(),
            **self._progress.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was."""
        if state_dict["method"] == self.method:
            self._learned = state_dict["learned"]
            if self.criterion is not None:
                self.criterion.load_state_dict(state_dict["criterion"])
        elif not state_dict["cut"]:
            rank_zero_warn(
                f"method={self.method!r} starts its scores anew: the checkpoint has those of {state_dict['method']!r}",
                category=RobustDistWarning,
            )
        if state_dict.get("target", str(self.target)) != str(self.target):
            rank_zero_warn(
                f"the checkpoint was made for {state_dict['target']}: a removal that is done stays as it is, one that "
                f"is not goes on to {self.target}",
                category=RobustDistWarning,
            )
        self.removed = {name: list(units) for name, units in state_dict["removed"].items()}
        self._way = float(state_dict["way"])
        self._cut = bool(state_dict["cut"])
        self._teacher.load_state_dict(state_dict["teacher"], state_dict.get("teacher_structure"))
        self._recalibration.load_state_dict(state_dict["recalibration"])
        self._report.load_state_dict(state_dict.get("report", {}))
        self._progress.load_state_dict(state_dict)

    # --- steps of pruning

    def _after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go as far as the schedule says."""
        done = self._progress.done
        wanted = self.schedule.progress(done) if self._learning is None else float(done >= self.schedule.end)
        # gradients of not a single step have nothing to say yet
        ready = self.criterion is not None and not self.criterion.needs_gradients
        if wanted > self._way and (ready or self._progress.num_steps):
            self._choose(trainer, pl_module, wanted)
        if self._way >= 1 and self.removal == "scheduled":
            self._remove(trainer, pl_module)

    def _choose(self, trainer: Trainer, pl_module: LightningModule, way: float) -> None:
        if self._learning is not None:
            removed = self._learning.removed()
        else:
            assert self.criterion is not None
            removed = self._select({g.name: self.criterion.score(g, self._tensors) for g in self.groups}, way)
        self.removed = trainer.strategy.broadcast(removed)
        self._way = way
        if self._learning is not None:
            self._learning.finish(self.removed, averaged_modules(trainer))
            self._learning = None
        self._mask(trainer, pl_module)
        assert self._cost is not None
        cost = self._cost.of(self.removed)
        figures = {
            "prune/amount": sum(map(len, self.removed.values())) / sum(group.size for group in self.groups),
            "prune/params": float(cost.params),
            "prune/macs": float(cost.macs),
        }
        self._report.note(self._progress.num_steps, figures)
        if trainer.training and not trainer.fit_loop.done:  # not at the end of fit, where Lightning refuses logs
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def _learn(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._cost is not None
        total = self._progress.num_steps + 1 if self._progress.total is None else self._progress.total
        self._learning = LearningPhase(
            self.method,  # type: ignore[arg-type]
            pl_module,
            self.groups,
            self.target,
            self._cost,
            num_steps=max(1, int(self.schedule.end * total)),
            choose=lambda scores: self._select(scores, 1.0),
            seed=self.seed,
            options=self._options,
        )
        if self._learned:
            self._learning.load_state_dict(self._learned)

    def _select(self, scores: Mapping[str, Tensor], way: float, groups: Sequence[UnitGroup] | None = None) -> Removed:
        return select(
            self.groups if groups is None else groups,
            scores,
            target=self.target,
            progress=way,
            cost=self._cost,
            latency=self._latency,
            uniform=self.uniform,
            round_to=self.round_to,
            min_units=self.min_units,
            removed=self.removed,
        )

    def _mask(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._masks is not None:
            self._masks.end()
        self._masks = Masking(trainer, pl_module, self._recipe(pl_module))

    def _recipe(self, pl_module: nn.Module) -> PruningRecipe:
        provenance = {
            "method": self.method,
            "target": {self.target.name: dict(self.target.shape) or self.target.value},
            "step": self._progress.num_steps,
            "torch": str(torch.__version__),
        }
        return compile_recipe(pl_module, self.groups, self.removed, provenance=provenance)

    def _remove(self, trainer: Trainer, pl_module: LightningModule) -> None:
        recipe = self._recipe(pl_module)
        self._end_masks_and_scores()
        cut_in_fit(trainer, pl_module, recipe)
        note_recipe(pl_module, recipe)
        self._cut, self._cost, self.groups, self._tensors = True, None, [], {}
        self._recalibration.start()

    def _end_masks_and_scores(self) -> None:
        if self._masks is not None:
            self._masks.end()
        if self._scoring is not None:
            self._scoring.close()
        self._masks, self._scoring = None, None

    def _make_criterion(self) -> Criterion | None:
        return None if self.method in LEARNED else make_criterion(self.method, **self._options)

    def _forget(self) -> None:
        """Begin a new training; a checkpoint is restored after this."""
        self.criterion = self._make_criterion()
        self.groups, self.removed, self._way, self._cut = [], {}, 0.0, False
        self._masks, self._cost, self._tensors, self._learned = None, None, {}, {}
        self._progress.reset()
        self._recalibration = Recalibration(self.bn_recalibration_batches)

    def _release(self, pl_module: LightningModule) -> None:
        release_checkpoints(pl_module)
        self._teacher.dismiss()
        self._progress.stop()
        self._recalibration.detach(pl_module)
        self._end_masks_and_scores()
        if self._learning is not None:
            self._learned = self._learning.state_dict()
            self._learning.close()
            self._learning = None
        self._cost, self.groups, self._tensors = None, [], {}
