"""The module as it will be without the removed units, while they are still there."""

from __future__ import annotations

from robustdist._lightning import LightningModule, Trainer
from robustdist.callbacks.pruning.surgery import averaged_modules, check_hashes
from robustdist.core.compiled import forget_compiled
from robustdist.pruning import PruningRecipe, UnitMasks
from robustdist.pruning.depth import skip_layers
from robustdist.pruning.hidden import norms_over_survivors

__all__ = ["Masking"]


class Masking:
    """Holds units at zero in the module, its averages and optimisers; norms and layers pass over what is to go.

    Args:
        trainer: The trainer.
        module: The dense module.
        recipe: What is to be removed.

    Raises:
        UsageError: If ranks have different recipes.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, recipe: PruningRecipe) -> None:
        check_hashes(recipe)
        self._masks = UnitMasks(module, recipe)
        self._hooks = [*norms_over_survivors(module, recipe), *skip_layers(module, recipe.dropped_layers)]
        self._module = module
        if self._hooks:
            forget_compiled(module)
        self.after_step(trainer)
        for average in averaged_modules(trainer):
            UnitMasks(average, recipe).apply()

    def before_step(self) -> None:
        """Zero the gradients, before these are clipped."""
        self._masks.apply_to_gradients()

    def after_step(self, trainer: Trainer) -> None:
        """Zero the weights and what optimisers remember of them."""
        self._masks.apply()
        self._masks.apply_to_moments(trainer.optimizers)

    def end(self) -> None:
        """Take the hooks away."""
        if self._hooks:
            forget_compiled(self._module)
        while self._hooks:
            self._hooks.pop().remove()
