"""Free adversarial training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.token_pgd import TokenPGD
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.types import check_count

__all__ = ["FreeAT"]


class _Step(NamedTuple):
    """What the backward pass of one step has to finish."""

    x_adv: Tensor
    delta: Tensor
    problem: Problem


class FreeAT(Objective):
    r"""Train on every batch several times; one backward pass moves the weights and the perturbation.

    .. math:: \theta \leftarrow \theta - \eta \nabla_\theta \ell(\theta; x + \delta, y), \quad
              \delta \leftarrow \Pi_\epsilon\big(\delta + c \, \epsilon \, \mathrm{sign} \, g\big), \quad
              g = \nabla_x \ell(\theta; x + \delta, y)

    with both gradients at the weights before the step. :math:`\delta` starts at zero and is carried over to the next
    batch, cut to its size or filled up with zeros. With the l2 norm the sign gives way to the normalised gradient and
    the clip to the projection onto the ball.

    Every replay is one ordinary step of the Trainer: it makes a batch of the loader last for ``replays`` steps and
    drops the ``replays - 1`` that follow, so that schedulers, averages, progress and logs count updates and a run costs
    what ordinary training costs. ``replays`` epochs of the Trainer take as many batches as one pass over the data (the
    paper divides the number of epochs by it); with a fixed order they are all of them, since the groups begin one
    batch later in every epoch, with a reshuffled one a random choice, 68 % of them for four replays. Hooks get the
    loader's batch, the step gets the one that is replayed. Without a Trainer the caller repeats the batch. A training
    that is resumed within a group goes on with the loader's present batch.

    Pixels that the perturbation presses against the image box keep their gradient: it is taken at the point inside the
    box, where the released code differentiates through the clamp.

    The attack gives norm, radius, units and bounds; its steps, start and loss play no part. Needs automatic
    optimisation.

    Args:
        replays: Steps on every batch, at least 1.
        step_factor: Length :math:`c` of the perturbation's step over the radius.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Shafahi et al., "Adversarial Training for Free!".
    """

    reads_backward = True
    state_is_per_rank = True

    def __init__(self, replays: int = 4, step_factor: float = 1.0) -> None:
        if not 0 < step_factor < float("inf"):
            raise UsageError(f"step_factor={step_factor} must be positive")
        self.replays = check_count(replays, "replays")
        self.step_factor = step_factor
        self._delta: Tensor | None = None
        self._step: _Step | None = None

    def adapt(self, attack: Attack) -> Attack:
        """Return the attack with the step of this method.

        Raises:
            UsageError: For an attack on tokens.
        """
        if isinstance(attack, TokenPGD):
            raise UsageError(
                "FreeAT carries its perturbation on to the next batch, which has other tokens in its places: "
                "use FreeLB for embeddings"
            )
        return attack.variant(step_size=self.step_factor * attack.eps)

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the ordinary loss at the perturbation so far."""
        problem = context.problem()
        delta = self._carried(problem.x)
        x_adv = problem.project(problem.x + delta).requires_grad_()
        loss = context.loss(context.from_pixels(x_adv))
        self._step = None if loss is None else _Step(x_adv, delta, problem)
        return loss

    def after_backward(self) -> None:
        """Move the perturbation along the input gradient that came with that of the weights."""
        step, self._step = self._step, None
        if step is None or step.x_adv.grad is None:
            return  # an exception kept the backward pass from happening
        problem = step.problem
        # an overflow skips the update of the weights; the perturbation must not keep it either
        grad = torch.nan_to_num(step.x_adv.grad, nan=0.0, posinf=0.0, neginf=0.0)
        moved = step.delta + problem.step_size * problem.ascent(grad, step.x_adv.detach())
        # onto the ball alone: the box is that of the image, which the next batch changes
        moved = replace(problem, x=torch.zeros_like(moved), bounds=None).project(moved)
        rest = None if self._delta is None else self._delta[len(moved) :]
        fits = rest is not None and rest.shape[1:] == moved.shape[1:]
        self._delta = torch.cat([moved, rest.to(moved)]) if rest is not None and fits else moved

    def reset(self) -> None:
        """Start from no perturbation."""
        self._delta = self._step = None

    def state_dict(self) -> dict[str, Any]:
        """Return the perturbation, shape (largest batch so far, ...), if there is one."""
        return {} if self._delta is None else {"delta": self._delta.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the perturbation of the checkpoint."""
        self._delta, self._step = state.get("delta"), None

    def _carried(self, x: Tensor) -> Tensor:
        delta = torch.zeros_like(x)
        if self._delta is not None and self._delta.shape[1:] == x.shape[1:]:  # images of another size start anew
            known = self._delta[: len(x)]
            delta[: len(known)] = known.to(delta)
        return delta
