"""Measure saved adversarial examples again, inside the Trainer that restores the model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from robustdist._lightning import Callback, LightningModule, Trainer
from robustdist.attacks.base import Attack
from robustdist.callbacks.evaluation.setup import attack_context
from robustdist.core.files import write_whole
from robustdist.core.forward import Forward, bind_forward
from robustdist.errors import UsageError
from robustdist.evaluation import load_examples, remeasure
from robustdist.report import SavedScore, wilson_interval

__all__ = ["Remeasurement"]


class Remeasurement(Callback):
    """Measures the examples when a test begins, and leaves the result beside them.

    Args:
        examples: File of saved examples.
        units: An attack whose ``mean`` and ``std`` are those of the model's inputs; None for inputs in pixel units.
        forward: What gives the logits: None for the module, or the path of a sub-module.

    Raises:
        UsageError: If the file cannot be read, or ``forward`` is a function of a whole batch.
    """

    def __init__(self, examples: str, units: Attack | None, forward: Forward) -> None:
        load_examples(examples)
        if callable(forward):
            raise UsageError("forward is a function of a whole batch, but only images are saved: name a sub-module")
        self.examples = examples
        self.mean, self.std = (None, None) if units is None else (units.mean, units.std)
        self.forward = forward

    @property
    def result_file(self) -> Path:
        """Where the result is left, for launchers whose workers' objects do not come back."""
        return Path(self.examples).with_suffix(".json")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, on rank zero."""
        if not trainer.is_global_zero:
            return
        parameter = next(pl_module.parameters(), torch.zeros(0))
        with attack_context(trainer, pl_module.device):
            score = remeasure(
                pl_module,
                self.examples,
                forward=bind_forward(pl_module, self.forward, None),
                mean=self.mean,
                std=self.std,
                dtype=parameter.dtype,
                device=pl_module.device,
            )
        write_whole(self.result_file, json.dumps(described(score), indent=2).encode())

    def result(self) -> SavedScore:
        """Return what was measured."""
        content = json.loads(self.result_file.read_text("utf-8"))
        return SavedScore(**{name: content[name] for name in SavedScore.__dataclass_fields__})


def described(score: SavedScore) -> dict[str, Any]:
    """Return the score with accuracies and their 95 % intervals."""
    content = asdict(score)
    for name, right in (("acc", score.num_right), ("acc_8bit", score.num_right_8bit)):
        if right is not None:
            content[name] = right / max(1, score.num_samples)
            content[f"{name}_interval"] = list(wilson_interval(right, score.num_samples))
    return content
