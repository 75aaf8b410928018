"""Export of a checkpoint: the module of the configuration, an input for it, and the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from robustdist._lightning import Callback, LightningModule, Trainer
from robustdist.callbacks.pruning.example import arguments_of, example_of
from robustdist.errors import UsageError
from robustdist.pruning.example import mapped, num_rows, with_rows
from robustdist.pruning.export import Exported, ExportFormat, export_module
from robustdist.pruning.loading import read_checkpoint, restore_pruned

__all__ = ["at_first_batch", "export_checkpoint", "model_of_checkpoint"]

T = TypeVar("T")


def at_first_batch(
    trainer: Trainer, function: Callable[[LightningModule, Any], T], model: LightningModule, loaders: Any, data: Any
) -> T:
    """Return ``function(model, batch)`` of the first training batch; training is broken off there.

    Raises:
        UsageError: If there is no batch.
    """
    kept, sanity = list(trainer.callbacks), trainer.num_sanity_val_steps  # type: ignore[attr-defined]
    trainer.callbacks, trainer.num_sanity_val_steps = [_FirstBatch(function)], 0  # type: ignore[attr-defined]
    try:
        trainer.fit(model, loaders, datamodule=data)
    except _Reached as reached:
        result: T = reached.result
        return result
    finally:
        trainer.callbacks, trainer.num_sanity_val_steps = kept, sanity  # type: ignore[attr-defined]
    raise UsageError("there is no training batch: give a training loader that has one")


class _Reached(Exception):  # noqa: N818 - no error: the way out of a fit
    """Training got to its first batch."""

    def __init__(self, result: Any) -> None:
        super().__init__("the first batch")
        self.result = result


class _FirstBatch(Callback):
    """Looks at the first batch and ends the fit there."""

    def __init__(self, function: Callable[[LightningModule, Any], Any]) -> None:
        self.function = function

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Leave with what the function makes of it."""
        raise _Reached(self.function(pl_module, batch))


def export_checkpoint(
    trainer: Trainer,
    model: LightningModule,
    loaders: Any,
    data: Any,
    *,
    ckpt_path: str | None,
    files: Mapping[ExportFormat, str | None],
    forward: str | None,
    input_shape: list[int] | None,
    tolerance: float,
) -> list[Exported]:
    """Load ``ckpt_path`` into the dense ``model`` and write it; arguments as in ``RobustTrainer.export``."""
    wanted = {format_: file for format_, file in files.items() if file is not None}
    if not wanted:
        raise UsageError("export writes nothing: give --onnx F, --torch-export F or both")
    if ckpt_path is None or not Path(ckpt_path).is_file():
        raise UsageError(f"ckpt_path={ckpt_path!r} is no file: give the path of a checkpoint")
    checkpoint = read_checkpoint(ckpt_path)
    try:
        part = model if forward is None else model.get_submodule(forward)
    except AttributeError as error:
        raise UsageError(f"forward={forward!r} is no part of {type(model).__name__}: {error}") from error
    example = arguments_of(part, _example(trainer, model, loaders, data, input_shape))
    restore_pruned(model.cpu(), checkpoint)
    return [export_module(part, example, file, format=format_, tolerance=tolerance) for format_, file in wanted.items()]


def _example(trainer: Trainer, model: LightningModule, loaders: Any, data: Any, input_shape: list[int] | None) -> Any:
    """What the model's forward is called with, two samples or more, on the CPU."""
    if input_shape is not None:
        return torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(0))
    example = model.example_input_array
    if example is None:
        if data is None and loaders is None and type(model).train_dataloader is LightningModule.train_dataloader:
            raise UsageError("export needs an input: give --config with data, or --input_shape such as [3,32,32]")
        example = at_first_batch(trainer, lambda module, batch: example_of(module, batch, None), model, loaders, data)
    return with_rows(mapped(example, lambda tensor: tensor.cpu()), max(2, num_rows(example)))


def model_of_checkpoint(arguments: list[str]) -> list[str]:
    """Return the argument that names the model's class, out of the checkpoint, where the user names none.

    LightningCLI notes it in checkpoints of classes that call ``save_hyperparameters()``, and takes the class's
    arguments from there by itself.

    Raises:
        UsageError: If the file is no checkpoint.
    """
    paths = [later for word, later in pairwise(arguments) if word == "--ckpt_path"]
    paths += [argument.split("=", 1)[1] for argument in arguments if argument.startswith("--ckpt_path=")]
    if not paths or not Path(paths[-1]).is_file():
        return []
    class_path = read_checkpoint(paths[-1]).get("hyper_parameters", {}).get("_class_path")
    named = {argument.split("=")[0] for argument in arguments} & {"--config", "-c", "--model"}
    return [] if named or class_path is None else [f"--model={class_path}"]
