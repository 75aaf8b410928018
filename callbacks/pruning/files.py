"""Checkpoints of pruned modules: structure before weights, and a word to those who load them as dense ones."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from robustdist._lightning import LightningModule, Trainer
from robustdist.callbacks.pruning.surgery import averaged_modules
from robustdist.errors import UsageError
from robustdist.pruning.loading import RECIPE_KEY, note_recipe, recipe_of

__all__ = ["explain_pruned_files", "follow_checkpoints", "release_checkpoints"]

_HOOK = "on_load_checkpoint"


def follow_checkpoints(trainer: Trainer, module: LightningModule, stage: str) -> None:
    """Let ``module`` take the structure of a checkpoint on before its weights are loaded.

    Lightning restores callbacks after the weights, so the module's own hook, which comes first, is wrapped on the
    instance.
    """
    present: Any = vars(module).get(_HOOK)
    if hasattr(present, "follows_structure"):
        if present.module is module:
            return
        release_checkpoints(module)  # a copy made in a fit brought the hook of its original along
    own = module.on_load_checkpoint

    @functools.wraps(own)
    def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
        # averages of an earlier fit are nobody's business in validation
        _take_structure(module, checkpoint, averaged_modules(trainer) if stage == "fit" else [])
        own(checkpoint)

    on_load_checkpoint.follows_structure = True  # type: ignore[attr-defined]
    on_load_checkpoint.module = module  # type: ignore[attr-defined]
    on_load_checkpoint.own = vars(module).get(_HOOK)  # type: ignore[attr-defined]
    vars(module)[_HOOK] = on_load_checkpoint


def release_checkpoints(module: LightningModule) -> None:
    """Give ``module`` its own hook back."""
    wrapper: Any = vars(module).get(_HOOK)
    if hasattr(wrapper, "follows_structure"):
        del vars(module)[_HOOK]
        if wrapper.own is not None:
            vars(module)[_HOOK] = wrapper.own


def _take_structure(module: LightningModule, checkpoint: dict[str, Any], averages: list[nn.Module]) -> None:
    recipe, present = recipe_of(checkpoint), getattr(module, "pruning_recipe", None)
    if present is not None and (recipe is None or recipe.hash() != present.hash()):
        raise UsageError(
            f"ckpt_path holds {'a dense' if recipe is None else 'another pruned'} model, and this module was pruned "
            f"already: build a fresh {type(module).__name__}, the checkpoint brings its structure along"
        )
    if recipe is None or present is not None:
        return
    recipe.apply(module)
    for average in averages:
        recipe.apply(average)
    note_recipe(module, recipe)


class _Explained:
    """``load_from_checkpoint`` that says what to do with a pruned file."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, instance: Any, cls: type) -> Any:
        load = self.original.__get__(instance, cls)

        @functools.wraps(load)
        def load_from_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(checkpoint_path, *args, **kwargs)
            except RuntimeError as error:
                if "size mismatch" in str(error) and _is_pruned(checkpoint_path):
                    raise UsageError(
                        f"{checkpoint_path} holds a pruned model: load it with "
                        f"robustdist.pruning.load_pruned({cls.__name__}, path)"
                    ) from error
                raise

        return load_from_checkpoint


def explain_pruned_files() -> None:
    """Let ``load_from_checkpoint`` name ``load_pruned`` where it fails on a pruned file; done once, at import."""
    original = vars(LightningModule)["load_from_checkpoint"]
    if not isinstance(original, _Explained):
        LightningModule.load_from_checkpoint = _Explained(original)  # type: ignore[method-assign, assignment]


def _is_pruned(path: Any) -> bool:
    content = torch.load(path, map_location="cpu", weights_only=True)
    return isinstance(content, dict) and RECIPE_KEY in content
