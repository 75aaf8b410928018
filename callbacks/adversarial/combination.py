"""What of AdversarialTraining goes together."""

from __future__ import annotations

from typing import Any

from robustdist._lightning import LightningModule, Trainer, check_same_package
from robustdist.core.forward import Forward
from robustdist.core.redirect import check_step_can_be_intercepted
from robustdist.core.space import Pixels, Space
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective

__all__ = ["check_combination", "check_compile", "check_options"]


def check_options(objective: Objective, attack_loss: Any, label_smoothing: float) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: Naming the option and the remedy.
    """
    name = type(objective).__name__
    if attack_loss is not None and objective.attacks_predictions:
        shown = repr(attack_loss) if isinstance(attack_loss, str) else getattr(attack_loss, "__name__", "a function")
        raise UsageError(
            f"attack_loss={shown} does not go with objective={name}, whose attack follows its own divergence: "
            "leave attack_loss out, or use PGDAT or DAT"
        )
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing={label_smoothing} must be in [0, 1): it is the share of the uniform targets")
    if label_smoothing and objective.replaces_loss:
        raise UsageError(f"label_smoothing mixes the module's own loss, which objective={name} replaces: set it to 0")


def check_compile(compile: bool, forward: Forward, space: Space | None) -> None:
    """Refuse to compile what is not a module's forward pass on pixels.

    Raises:
        UsageError: Naming the option and the remedy.
    """
    if compile and callable(forward):
        raise UsageError("compile=True needs to know which part to compile: give forward as the path of a sub-module")
    if compile and not isinstance(space, (Pixels, type(None))):
        raise UsageError(f"compile=True does not go with space={type(space).__name__}: set compile=False")


def check_combination(
    trainer: Trainer,
    module: LightningModule,
    objective: Objective,
    precision: str,
    attack_loss: Any,
    label_smoothing: float,
) -> None:
    """Refuse a Trainer and a module that the options of AdversarialTraining do not fit.

    Raises:
        UsageError: Naming the option and the remedy.
    """
    name = type(objective).__name__
    check_same_package(module)
    check_step_can_be_intercepted(
        trainer.strategy,
        module,
        needs_second_pass=objective.needs_second_pass,
        option=f"AdversarialTraining(objective={name})",
    )
    if precision not in ("inherit", "auto") and trainer.precision not in ("32-true", "bf16-mixed", "16-mixed"):
        raise UsageError(
            f"precision={precision!r} of the attack does not go with precision={trainer.precision!r} of the "
            "Trainer, whose weights have that type: use precision='inherit'"
        )
    if not module.automatic_optimization:
        if objective.reads_backward:
            raise UsageError(
                f"objective={name} reads the input gradient from Lightning's own backward pass, which manual "
                "optimisation does not make: set automatic_optimization=True, or use PGDAT"
            )
        if attack_loss == "training_step" or label_smoothing:
            option = "attack_loss='training_step'" if attack_loss == "training_step" else "label_smoothing"
            raise UsageError(
                f"{option} needs a training_step that only returns its loss, but in manual optimisation it makes the "
                "update: set automatic_optimization=True, or write attack_step and smooth the module's own loss"
            )
    objective.check_module(module)
