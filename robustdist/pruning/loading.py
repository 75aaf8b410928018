"""Small models out of their checkpoints: class, hyper-parameters, recipe, weights."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from robustdist.errors import UsageError
from robustdist.pruning.recipe import Fingerprint, PruningRecipe

__all__ = [
    "RECIPE_KEY",
    "load_pruned",
    "note_recipe",
    "pruned_loading",
    "read_checkpoint",
    "recipe_of",
    "restore_pruned",
]

#: Where a checkpoint keeps the recipe, as plain data.
RECIPE_KEY = "robustdist.pruning"
_SAVE = "on_save_checkpoint"

M = TypeVar("M", bound=nn.Module)


def recipe_of(checkpoint: Mapping[str, Any]) -> PruningRecipe | None:
    """Return the recipe that was carried out on the weights of ``checkpoint``; ``None`` if they are dense."""
    content = checkpoint.get(RECIPE_KEY)
    return None if content is None else PruningRecipe.from_dict(content)


class _SavesRecipe:
    """``on_save_checkpoint`` of a pruned module: files without its recipe could not be loaded."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.on_save_checkpoint

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        self.own(checkpoint)
        checkpoint[RECIPE_KEY] = self.module.pruning_recipe.to_dict()


def note_recipe(module: nn.Module, recipe: PruningRecipe) -> None:
    """Note on ``module`` that ``recipe`` was carried out on it, after others if there were any.

    It is ``module.pruning_recipe`` from now on, and in all checkpoints that a Trainer writes of ``module``, those of
    weights alone too, with or without callbacks of ours.
    """
    earlier = getattr(module, "pruning_recipe", None)
    module.pruning_recipe = recipe if earlier is None else earlier.compose(recipe)  # type: ignore[assignment]
    if hasattr(module, _SAVE) and not isinstance(vars(module).get(_SAVE), _SavesRecipe):
        vars(module)[_SAVE] = _SavesRecipe(module)


def load_pruned(
    module_class: type[M],
    checkpoint_path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    strict: bool = True,
    **hyper_parameters: Any,
) -> M:
    """Load a checkpoint of a pruned model: the dense module from its class, made small, then the weights.

    Needs neither torch-pruning nor a Trainer. A checkpoint without a recipe loads as usual. Trained on by a Trainer,
    the module writes its recipe into checkpoints again.

    Args:
        module_class: The user's class, as for ``load_from_checkpoint``.
        checkpoint_path: File written by the Trainer.
        map_location: As in ``torch.load``.
        strict: As in ``load_state_dict``.
        **hyper_parameters: Arguments of the class; they go before those saved with ``save_hyperparameters``.

    Returns:
        The small module, in training mode like a new one.

    Raises:
        UsageError: If the class cannot be built from what there is, or the recipe was made for another model.

    Example:
        ``net = load_pruned(MyModule, "last.ckpt").eval()``
    """
    checkpoint = read_checkpoint(checkpoint_path, map_location)
    arguments = {**_saved_arguments(module_class, checkpoint), **hyper_parameters}
    try:
        module = module_class(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{module_class.__name__} cannot be built from the arguments in the checkpoint ({error}): call "
            "save_hyperparameters() in its __init__, or pass them to load_pruned"
        ) from error
    restore_pruned(module, checkpoint, strict=strict)
    return module


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> Mapping[str, Any]:
    """Return the content of a Trainer's checkpoint; only tensors and plain types are read.

    Raises:
        UsageError: If the file is something else.
    """
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                raise UsageError(f"{os.fspath(path)} is cut off, its writing did not end: take an earlier checkpoint")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, EOFError, LookupError) as error:
        foreign = re.search(r"Unsupported \w+: (?:GLOBAL )?(\S+)", str(error))
        if foreign is None:
            raise UsageError(
                f"{os.fspath(path)} is no checkpoint: give the path of a file that a Trainer wrote"
            ) from error
        raise UsageError(
            f"{os.fspath(path)} holds {foreign.group(1)}, but only tensors and plain types are read: leave it out of "
            "the checkpoint with save_hyperparameters(ignore=[...])"
        ) from error
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        raise UsageError(f"{os.fspath(path)} is no checkpoint of a Trainer: it has no state_dict")
    return checkpoint


def restore_pruned(module: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True) -> None:
    """Make the dense ``module`` what ``checkpoint`` holds: small if it was pruned, then the weights.

    Raises:
        UsageError: If the recipe was made for another model.
    """
    recipe = recipe_of(checkpoint)
    if recipe is not None:
        recipe.apply(module)
        note_recipe(module, recipe)
    module.load_state_dict(checkpoint["state_dict"], strict=strict)


def _saved_arguments(module_class: type[nn.Module], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of the checkpoint that the class's ``__init__`` takes."""
    saved = dict(checkpoint.get("hyper_parameters", {}))
    parameters = inspect.signature(module_class.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return saved
    return {name: value for name, value in saved.items() if name in parameters}


@contextmanager
def pruned_loading() -> Iterator[None]:
    """Let code that loads checkpoints by itself load pruned ones, ``MyModule.load_from_checkpoint(path)`` for example.

    Inside the context ``torch.load`` notes the recipes of files, and ``load_state_dict`` makes a module that one of
    them was made for small first. :func:`load_pruned` is the direct way.

    Example:
        ``with pruned_loading(): net = MyModule.load_from_checkpoint("last.ckpt")``
    """
    load, load_state_dict = torch.load, nn.Module.load_state_dict
    recipes: dict[str, PruningRecipe] = {}

    @functools.wraps(load)
    def noting_load(*args: Any, **kwargs: Any) -> Any:
        content = load(*args, **kwargs)
        recipe = recipe_of(content) if isinstance(content, Mapping) else None
        if recipe is not None:
            recipes[recipe.dense.shapes] = recipe
        return content

    @functools.wraps(load_state_dict)
    def fitting_load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recipe = recipes.get(Fingerprint.of(self).shapes) if recipes else None
        if recipe is not None:
            recipe.apply(self)
            note_recipe(self, recipe)
        return load_state_dict(self, *args, **kwargs)

    torch.load = noting_load
    nn.Module.load_state_dict = fitting_load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.load = load
        nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
