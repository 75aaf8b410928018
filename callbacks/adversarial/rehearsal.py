"""Try the attack on the first batch, before anything is trained."""

from __future__ import annotations

from dataclasses import replace

from robustdist._lightning import Trainer, rank_zero_info, rank_zero_warn
from robustdist.attacks.losses import check_class_indices
from robustdist.callbacks.adversarial.step import ObjectiveStep
from robustdist.core.forward import looks_like_probabilities
from robustdist.core.ranks import failing_together
from robustdist.errors import RobustDistWarning
from robustdist.objectives.base import Objective

__all__ = ["rehearse", "settle_fast_path"]

# Share of images without a gradient to follow above which the user is told.
_NO_GRADIENT_SHARE = 0.1


def rehearse(step: ObjectiveStep, objective: Objective) -> None:
    """Attack the first batch, so that what does not fit is said before the first update.

    Raises:
        UsageError: If inputs, targets or module do not fit the attack.
    """
    # with the whole radius: a ramp begins with next to nothing
    step = replace(step, call=replace(step.call, step=0, eps_scale=1.0, step_scale=1.0))
    logits = step.reference(step.x) if step.inner_step is None or step.label_smoothing else None
    targets = step.y if logits is None else objective.trial_targets(logits, step.y)
    if logits is not None and step.label_smoothing:
        classes = step.y if objective.attacks_predictions else targets
        check_class_indices(logits, classes, remedy="label_smoothing is about classification, set it to 0")
    result = step.run_attack(step.x, targets)
    share = result.no_gradient.float().mean().item() if len(step.x) else 0.0
    if logits is not None and looks_like_probabilities(logits):
        rank_zero_warn(
            "the model returns probabilities, not logits, whose gradient vanishes where the model is sure "
            f"({share:.0%} of these images now): leave softmax to the loss, or name the part that returns logits "
            "with the option forward",
            category=RobustDistWarning,
        )
    elif share > _NO_GRADIENT_SHARE:
        rank_zero_warn(
            f"{share:.0%} of the first images have no input gradient to follow: the attack is blind there "
            "(huge logits or a part without gradient); try attack_loss='margin'",
            category=RobustDistWarning,
        )


def settle_fast_path(trainer: Trainer, step: ObjectiveStep, objective: Objective) -> None:
    """Let the fast path look at the first batch of the real attack; all processes use what the first one chose.

    Raises:
        UsageError: If one of its options does not go with the module.
    """
    with failing_together():
        _prepare_fast_path(step, objective)
    step.fast_path.adopt(trainer.strategy.broadcast(step.fast_path.chosen))
    rank_zero_info(str(step.fast_path))


def _prepare_fast_path(step: ObjectiveStep, objective: Objective) -> None:
    step = replace(step, call=replace(step.call, step=0, eps_scale=1.0, step_scale=1.0))
    problem = step.context().problem()
    # not at the clean inputs, where an objective that attacks predictions has no gradient
    x = problem.start("fast path")
    targets = problem.y if step.inner_step else objective.trial_targets(step.reference(step.x), problem.y)
    step.fast_path.prepare(
        step.module,
        x,
        forward=problem.logits,
        loss=lambda logits: problem.loss(logits, targets).sum() * problem.loss_scale,
        mode=step.attack.model_mode,
    )
