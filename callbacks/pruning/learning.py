"""Masks that are learned while the weights are trained: gates in the forward passes, and what moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from robustdist._lightning import LightningModule, Trainer, rank_zero_warn
from robustdist.callbacks.pruning.scoring import reduced_gradients
from robustdist.errors import RobustDistWarning
from robustdist.pruning.attention import slim
from robustdist.pruning.cost import CostModel, keep_values
from robustdist.pruning.gates import Gates, LearnedScores, fold
from robustdist.pruning.groups import UnitGroup
from robustdist.pruning.hard_concrete import LearnedMasks
from robustdist.pruning.importance import named_tensors
from robustdist.pruning.selection import Removed, Target

__all__ = ["LEARNED", "LearnedMethod", "LearningPhase"]

LearnedMethod: TypeAlias = Literal["l0", "hydra"]
LEARNED = ("l0", "hydra")
#: Share of the phase over which the constraint of L0 masks grows to the target.
_WARMUP = 0.2
#: How far from the target learned sparsity may be at the end before it is worth a warning.
_FAR = 0.1


class LearningPhase:
    """From the first step to the removal: one multiplier per unit in front of all layers that read it.

    ``l0`` draws hard-concrete multipliers in every step and trains them under a constraint on the size, together with
    the weights. ``hydra`` keeps the units with the best learned scores at 1 and the others at 0, and leaves the weights
    as they are meanwhile.

    Args:
        method: Which.
        module: The dense module.
        groups: Groups of its units.
        target: What is to be left.
        cost: Its cost.
        num_steps: Length of the phase in optimiser steps.
        choose: Takes scores and returns the units that go.
        seed: Seed of the draws.
        options: Further arguments of the method.
    """

    def __init__(
        self,
        method: LearnedMethod,
        module: LightningModule,
        groups: Sequence[UnitGroup],
        target: Target,
        cost: CostModel,
        *,
        num_steps: int,
        choose: Callable[[Mapping[str, Tensor]], Removed],
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        self.method = method
        self.num_steps = num_steps
        self._module, self._groups, self._choose = module, list(groups), choose
        self._masks: LearnedMasks | None = None
        self._scores: LearnedScores | None = None
        if method == "l0":
            settings = {"warmup_steps": int(_WARMUP * num_steps), "total_steps": num_steps, "seed": seed, **options}
            self._masks = LearnedMasks(groups, target, cost=cost, **settings)
        else:
            self._scores = LearnedScores.hydra(groups, named_tensors(module), **options)
        swaps = dict.fromkeys(path for group in groups for path in group.swaps)
        self._undo = [slim(module.get_submodule(path)) for path in swaps]
        self.gates = Gates(module, groups).install()
        self._set_for: int | None = None
        self._pending: dict[str, Tensor] | None = None
        self._pending_of = -1

    def before_batch(self, step: int) -> None:
        """Set the multipliers of optimiser step ``step``, the same for all its batches and on all ranks."""
        if self._set_for != step:
            self._set_for = step
            self.gates.set(self._masks.sample(step) if self._masks is not None else self._fixed())

    def before_evaluation(self) -> None:
        """Set the multipliers without chance, as they would be fixed now."""
        self._set_for = None
        self.gates.set(self._fixed())

    def before_step(self, trainer: Trainer, optimizer: Any) -> None:
        """Take the multipliers' gradients, in the scale of the loss; leave the weights out of the step of ``hydra``."""
        found = reduced_gradients(trainer, self.gates)
        batch = trainer.fit_loop.total_batch_idx
        if self._pending is not None and self._pending_of == batch:  # several optimisers step after one batch
            found = {name: gradient + self._pending[name] for name, gradient in found.items()}
        self._pending, self._pending_of = found, batch
        if self._scores is not None:
            for part in optimizer.param_groups:
                for parameter in part["params"]:
                    parameter.grad = None

    def after_step(self, step: int) -> None:
        """Move masks or scores, after optimiser step ``step`` was executed."""
        pending, self._pending = self._pending, None
        if pending is None or not all(bool(torch.isfinite(gradient).all()) for gradient in pending.values()):
            return
        if self._masks is not None:
            self._masks.step(pending, step)
        elif self._scores is not None:
            self._scores.step(pending)

    def removed(self) -> Removed:
        """Return the units that go at the end: by learned scores, as many as the target says, learned or not."""
        if self._masks is not None:
            return self._choose(self._masks.scores()) if self._masks.widths is None else self._masks.removed()
        assert self._scores is not None
        tensors = named_tensors(self._module)
        return self._choose({group.name: self._scores.score(group, tensors) for group in self._groups})

    def finish(self, removed: Removed, copies: Sequence[nn.Module]) -> None:
        """Multiply what units that stay were multiplied by into the weights, of averaged copies too; end the gates."""
        values = {}
        if self._masks is not None:
            self._tell_if_unfinished(self._masks)
            values = self._masks.values(removed)
        self.close()
        for module in (self._module, *copies):
            fold(module, self._groups, values)

    def close(self) -> None:
        """Take the gates away."""
        self.gates.remove()
        while self._undo:
            self._undo.pop()()

    def logs(self) -> dict[str, float]:
        """Return what to log: expected and wanted sparsity of ``l0``."""
        if self._masks is None:
            return {}
        with torch.no_grad():
            expected, final, _ = self._masks.sparsities()
        progress = self._masks.progress(self._set_for or 0)
        return {
            "prune/sparsity_expected": float(expected.mean()),
            "prune/sparsity_target": float(final.mean()) * progress,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return masks or scores."""
        held = self._masks if self._masks is not None else self._scores
        assert held is not None
        return held.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        held = self._masks if self._masks is not None else self._scores
        assert held is not None
        held.load_state_dict(state)

    @torch.no_grad()
    def _tell_if_unfinished(self, masks: LearnedMasks) -> None:
        expected, final, _ = masks.sparsities()
        distance, worst = (final - expected).abs().max(0)
        if distance > _FAR:
            what = masks.target.name if masks.widths is None else f"group {masks.groups[int(worst)].name}"
            rank_zero_warn(
                f"method='l0': masks have learned to remove {float(expected[worst]):.2g} of {what}, "
                f"{float(final[worst]):.2g} is wanted: what goes is chosen by unfinished scores; give more steps until "
                f"schedule.end (now {self.num_steps}), a larger lr or a smaller warmup_steps in method_options",
                category=RobustDistWarning,
            )

    def _fixed(self) -> dict[str, Tensor]:
        if self._masks is not None:
            return self._masks.values()
        return keep_values(self._groups, self.removed())
