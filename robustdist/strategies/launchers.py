"""Forked and spawned training after which the main process knows the structure of the trained module.

Lightning's launchers send the weights back and load them into the module of the main process. If workers made the
module smaller, the shapes do not fit: these launchers send the recipe along.
"""

from __future__ import annotations

from typing import Any

from robustdist._lightning import DDPStrategy, MultiProcessingLauncher, Trainer
from robustdist.pruning import PruningRecipe
from robustdist.pruning.loading import note_recipe

__all__ = ["FollowsStructure", "RobustDDPStrategy", "StructureLauncher"]

_KEY = "robustdist.pruning"


class StructureLauncher(MultiProcessingLauncher):
    """Sends the recipe of a pruned module back to the main process, before the weights are loaded there."""

    follows_structure = True

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """Add the recipe, as text."""
        extra: dict[str, Any] = super().get_extra_results(trainer)
        recipe = getattr(trainer.lightning_module, "pruning_recipe", None)
        if recipe is not None:
            extra[_KEY] = recipe.to_json()
        return extra

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        text = worker_output.extra.pop(_KEY, None)
        module = trainer.lightning_module
        if text is not None:
            recipe, earlier = PruningRecipe.from_json(text), getattr(module, "pruning_recipe", None)
            if earlier is not None:
                recipe = recipe.after(earlier, module)
            recipe.apply(module)
            note_recipe(module, recipe)
        super()._recover_results_in_main_process(worker_output, trainer)


class FollowsStructure(DDPStrategy):
    """Base of strategies of the DDP family: uses :class:`StructureLauncher` where Lightning would fork or spawn."""

    _structure_launcher: StructureLauncher | None = None

    @property
    def launcher(self) -> Any:
        """What starts the processes."""
        found = super().launcher
        if not isinstance(found, MultiProcessingLauncher) or self._start_method == "popen":
            return found
        if self._structure_launcher is None:
            self._structure_launcher = StructureLauncher(self, start_method=self._start_method)
        return self._structure_launcher


class RobustDDPStrategy(FollowsStructure):
    """Lightning's DDP for modules that change their structure in training, ``Trainer(strategy="robust_ddp_fork")``.

    The same as ``ddp``, but that the main process of a forked or spawned training gets the structure with the weights.
    """
