"""The final table of a pruning: gathered while a fit runs, printed and written at its end."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from robustdist._lightning import LightningModule, Trainer, rank_zero_info, rank_zero_warn
from robustdist.callbacks.pruning.example import example_of, forward_of
from robustdist.core.files import write_whole
from robustdist.core.forward import Forward
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning.example import mapped
from robustdist.pruning.report import compared, dense_shell, depths, layer_widths, regrown
from robustdist.pruning.selection import Target
from robustdist.report.drawing import png_bytes
from robustdist.report.pruning import plot_schedule, pruning_tables, wide_console

__all__ = ["FinalReport"]

_ACCURACY = re.compile(r"(^|[/_])acc(uracy)?$")


class FinalReport:
    """What the dense module was, how far pruning was at which step, and accuracies of validation.

    Args:
        wanted: Whether anything is done.
        directory: Folder for ``pruning.json`` and ``pruning.png``; None for the table alone.

    Raises:
        UsageError: If ``directory`` is a file.
    """

    def __init__(self, wanted: bool, directory: str | None) -> None:
        if directory is not None and Path(directory).is_file():
            raise UsageError(f"report_dir={directory!r} is a file: choose a folder")
        self.wanted = wanted
        self.directory = directory
        self.schedule: list[dict[str, float]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._shell: nn.Module | None = None
        self._example: Any = None

    def begin(self, module: LightningModule) -> None:
        """Start anew, and note the shapes of the dense module; a checkpoint is restored after this."""
        self.schedule, self.evaluations, self._shell, self._example = [], [], None, None
        self._note_shapes(module)

    def see(self, module: LightningModule, batch: Any, input_key: str | int | None) -> None:
        """Keep two samples of the first batch."""
        if self.wanted and self._example is None:
            self._note_shapes(module)  # made in configure_model, after setup
            self._example = mapped(example_of(module, batch, input_key), lambda tensor: tensor.cpu().clone())

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Note how much is gone from ``step`` on."""
        self.schedule.append({"step": step, **{key.removeprefix("prune/"): value for key, value in figures.items()}})

    def evaluated(self, trainer: Trainer, step: int, phase: str) -> None:
        """Note the accuracies of a validation; ``phase`` is dense, masked or small."""
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if _ACCURACY.search(name) and not name.startswith("train") and math.isfinite(float(value))
        }
        if metrics and not trainer.sanity_checking:
            self.evaluations.append({"step": step, "phase": phase, "metrics": metrics})

    def state_dict(self) -> dict[str, Any]:
        """Return what was noted."""
        return {"schedule": self.schedule, "evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; checkpoints may lack it."""
        self.schedule, self.evaluations = list(state.get("schedule", ())), list(state.get("evaluations", ()))

    def finish(
        self, trainer: Trainer, module: LightningModule, forward: Forward, *, method: str, target: Target
    ) -> None:
        """Measure, print and write, on rank 0."""
        shell, self._shell = self._shell, None
        example, self._example = self._example, None
        if not self.wanted or not trainer.is_global_zero:
            return
        wanted: Mapping[Any, float] = target.shape or {target.name: target.value}
        about = {"method": method, "target": dict(wanted)}
        content = about | self._content(module, shell, example, forward_of(forward))
        for part in pruning_tables(content):
            wide_console().print(part)
        if self.directory is None:
            return
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        file = write_whole(folder / "pruning.json", (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
        rank_zero_info(f"report of the pruning: {file}")
        if importlib.util.find_spec("matplotlib") is None:
            rank_zero_warn(
                "report_dir: there is no picture of the schedule without matplotlib: pip install 'robustdist[plots]'",
                category=RobustDistWarning,
            )
        else:
            write_whole(folder / "pruning.png", png_bytes(plot_schedule(content)))

    def _note_shapes(self, module: LightningModule) -> None:
        pruned = getattr(module, "pruning_recipe", None) is not None
        if self.wanted and self._shell is None and not pruned and next(module.parameters(), None) is not None:
            self._shell = dense_shell(module)

    def _content(
        self,
        module: LightningModule,
        shell: nn.Module | None,
        example: Any,
        forward: Callable[[nn.Module, Any], Any],
    ) -> dict[str, Any]:
        recipe: Any = module.pruning_recipe
        content: dict[str, Any] = {
            "model": type(module).__name__,
            "layers": [vars(layer).copy() for layer in layer_widths(recipe, module)],
            "depths": depths(recipe, module),
            "schedule": self.schedule,
            "evaluations": self.evaluations,
            "metrics": _by_phase(self.evaluations),
            "sizes": None,
            "not_measured": None,
        }
        if shell is None or example is None:
            content["not_measured"] = "the dense module was not seen in this fit"
            return content
        try:
            dense, small = compared(regrown(shell, module, recipe), module, example, forward)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            # a model that only runs where it was trained; training is done, and its result is not lost over a table
            content["not_measured"] = f"a copy on the CPU failed: {type(error).__name__}: {error}"
            return content
        content["sizes"] = {"dense": dense.to_dict(), "small": small.to_dict()}
        return content


def _by_phase(evaluations: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Accuracies of the last dense module, the first small one and the last small one, with their steps."""
    dense = [entry for entry in evaluations if entry["phase"] == "dense"]
    small = [entry for entry in evaluations if entry["phase"] == "small"]
    chosen = {"dense": dense[-1:], "after_removal": small[:1] if len(small) > 1 else [], "after_tuning": small[-1:]}
    return {
        name: {phase: {"value": entry["metrics"][name], "step": entry["step"]}
               for phase, found in chosen.items() for entry in found if name in entry["metrics"]}
        for name in dict.fromkeys(name for entry in evaluations for name in entry["metrics"])
    }  # fmt: skip
