"""Distillation from the dense module while it is pruned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robustdist._lightning import LightningModule, Trainer
from robustdist.core.forward import as_logits
from robustdist.core.redirect import StepInterceptor, check_step_can_be_intercepted
from robustdist.errors import UsageError
from robustdist.pruning import PruningRecipe
from robustdist.pruning.distillation import check_distillation, distilled

__all__ = ["Teacher"]

#: Innermost of all transforms of the step: the teacher sees the batch that the step sees, attacked or not.
_ORDER = 1000


class Teacher:
    """A frozen copy of the module as it was when training began, whose predictions the loss of the step follows.

    Args:
        weight: Weight of the divergence in the loss, in [0, 1]; 0 does nothing.
        temperature: Of both softmaxes.
        part: Path of the part that returns the logits; empty for the module itself.
    """

    def __init__(self, weight: float, temperature: float, part: str) -> None:
        check_distillation(weight, temperature)
        self.weight = weight
        self.temperature = temperature
        self.part = part
        self._copy: nn.Module | None = None
        self._recipe: PruningRecipe | None = None
        self._restored = False
        self._strategy: Any = None

    def enrol(self, trainer: Trainer, module: LightningModule) -> None:
        """Copy the dense module and wrap the training step; before weights are restored.

        Raises:
            UsageError: If the step cannot be wrapped.
        """
        if not self.weight:
            return
        option = "StructuredPruning(distill)"
        check_step_can_be_intercepted(trainer.strategy, module, needs_second_pass=True, option=option)
        self._copy, self._restored = copy.deepcopy(module).eval().requires_grad_(False), False
        self._recipe = getattr(module, "pruning_recipe", None)
        self._strategy = trainer.strategy
        StepInterceptor.of(self._strategy).add(self._training_step, _ORDER)

    def begin(self, module: LightningModule) -> None:
        """Take over the weights that training begins with, unless a checkpoint of this training brought them."""
        if self._copy is None:
            return
        if not self._restored:
            self._copy.load_state_dict(module.state_dict())
        self._copy.to(module.device)

    def dismiss(self) -> None:
        """Unwrap the step. The copy stays until the next training: checkpoints written after the fit need it."""
        if self._strategy is not None:
            StepInterceptor.of(self._strategy).remove(self._training_step)
        self._strategy = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the teacher's weights: the module's own have changed since."""
        return {} if self._copy is None else dict(self._copy.state_dict())

    def structure(self) -> dict[str, Any] | None:
        """Return the recipe of a teacher that was small itself, as plain data."""
        return None if self._copy is None or self._recipe is None else self._recipe.to_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], structure: Mapping[str, Any] | None) -> None:
        """Take the teacher's weights from a checkpoint, and its structure if an earlier fit had pruned it.

        Raises:
            UsageError: If the module had been pruned further than the teacher when this training began.
        """
        if self._copy is None or not state:
            return
        recipe = None if structure is None else PruningRecipe.from_dict(structure)
        if self._recipe is None and recipe is not None:
            recipe.apply(self._copy)
            self._recipe = recipe
        elif self._recipe is not None and (recipe is None or recipe.hash() != self._recipe.hash()):
            raise UsageError(
                "the teacher in ckpt_path is larger than the module given to fit, which was pruned already: build a "
                f"fresh {type(self._copy).__name__}, the checkpoint brings both structures along"
            )
        self._copy.load_state_dict(state)
        self._restored = True

    def _training_step(self, next_step: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        module = self._strategy.lightning_module
        calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

        def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if torch.is_grad_enabled():
                calls.append((inputs, named, output))

        handle = module.get_submodule(self.part).register_forward_hook(keep, with_kwargs=True)
        try:
            output = next_step(batch, *args, **kwargs)
        finally:
            handle.remove()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            return output  # the step skips the batch
        if not calls:
            raise UsageError(
                f"distill: training_step did not call {self.part or 'the module itself'}, so there are no logits to "
                "follow the teacher with: name the part that it calls with the option forward"
            )
        inputs, named, returned = calls[-1]
        assert self._copy is not None
        with torch.no_grad():
            teacher = as_logits(self._copy.get_submodule(self.part)(*inputs, **named))
        mixed = distilled(loss, as_logits(returned), teacher, weight=self.weight, temperature=self.temperature)
        return {**output, "loss": mixed} if isinstance(output, Mapping) else mixed
