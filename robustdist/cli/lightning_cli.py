"""LightningCLI with the subcommands evaluate, remeasure, plan and export and the section report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from robustdist._lightning import (
    EarlyStopping,
    LightningArgumentParser,
    LightningCLI,
    LightningModule,
    ModelCheckpoint,
    SaveConfigCallback,
    Trainer,
    rank_zero_info,
)
from robustdist.attacks.base import Attack
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.cli.stopwatch import Stopwatch
from robustdist.cli.trainer import RobustTrainer, check_checkpoint
from robustdist.core.guard import forked_rng
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.report import EvaluationResult, comparison_table, evaluation_table, saved_table
from robustdist.report.pruning import plan_tables, wide_console

__all__ = ["ReportOptions", "RobustCLI", "run_lightning_cli"]


@dataclass
class ReportOptions:
    """What ``fit`` does when training is over.

    Args:
        dir: Folder for report.json, report.html and the pictures.
        attacks: Attacks by name for the final test; default those of the configured RobustEvaluation.
        control: Also train the same module without AdversarialTraining and show both.
        max_samples: Test only the first samples; None for all.
        thorough: Examine the final test with attacks of its own: all checks, and curves.
        leaderboard: Fields of the leaderboard row that only you know: name, authors, link, venue, dataset, ...
    """

    dir: str
    attacks: dict[str, Attack] | None = None
    control: bool = False
    max_samples: int | None = None
    thorough: bool = False
    leaderboard: dict[str, Any] | None = None


class RobustCLI(LightningCLI):
    """The command line of Lightning, with robust evaluation."""

    trainer: RobustTrainer
    _ADVERSARIAL = "adversarial training"
    _ORDINARY = "ordinary training"

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the verbs and the arguments that do not come from the command line."""
        own = {"model", "dataloaders", "datamodule"}
        return {
            **LightningCLI.subcommands(),
            "evaluate": own,
            "remeasure": own,
            "plan": {*own, "train_dataloaders"},
            "export": {*own, "train_dataloaders"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section ``report``."""
        parser.add_argument(
            "--report",
            type=ReportOptions | None,
            default=None,
            help="After fit: test under attack, optionally against an ordinary control, and write a report.",
        )

    def before_instantiate_classes(self) -> None:
        """Check what can be checked before anything is built."""
        check_checkpoint(self._get(self.config, "ckpt_path"))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer; the control's differs from the user's."""
        alone = {"strategy": "auto", "devices": 1, "num_nodes": 1, "logger": False}  # whatever the training has
        alone = alone if self.subcommand in ("plan", "export") else {}
        return super().instantiate_trainer(**kwargs, **alone, **getattr(self, "_trainer_overrides", {}))

    def before_fit(self) -> None:
        """Train the control, if the report asks for one."""
        self._control: tuple[EvaluationResult, float] | None = None
        report = self._report_options()
        if report is None:
            return
        if Path(report.dir).is_file():
            raise UsageError(f"report.dir={report.dir!r} is a file: choose a folder")
        if report.control and not any(isinstance(c, AdversarialTraining) for c in self.trainer.callbacks):
            raise UsageError(
                "report.control compares with AdversarialTraining, which is not among trainer.callbacks: "
                "add configs/attack/pgd.yaml after your own config, or set report.control=false"
            )
        if report.attacks is None and not self._evaluations():
            raise UsageError("report has no attacks: give report.attacks, or configure a RobustEvaluation callback")
        self.trainer.callbacks.append(Stopwatch())
        for callback in self._evaluations():
            if callback.report_dir is None:
                callback.report_dir = report.dir  # for the curves of training
                break
        if report.control:
            rank_zero_info(f"report: training the control first ({self._ORDINARY} of the same module)")
            # the run that follows draws the same random numbers as it would without a control
            with forked_rng(self.trainer.strategy.root_device, derive_seed(0, "control")):
                self._control = self._train_control(report)
            rank_zero_info(f"report: {self._ADVERSARIAL}")
        self._started = time.time()

    def after_fit(self) -> None:
        """Test under attack, write the report and print it."""
        report = self._report_options()
        if report is None:
            return
        seconds = {self._ADVERSARIAL: Stopwatch.read(self.trainer)}
        evaluation = self.trainer.judge(
            report.attacks,
            report.dir,
            report.max_samples,
            thorough=report.thorough,
            leaderboard=report.leaderboard,
        )
        evaluation.history = self._history(Path(report.dir) / "report.json")
        if self._control is not None:
            evaluation.context.comparison = {self._ORDINARY: self._control[0]}
            evaluation.context.label = self._ADVERSARIAL
            evaluation.context.train_seconds = seconds = {self._ORDINARY: self._control[1], **seconds}
        evaluation.context.title = f"Robust evaluation of {type(self.model).__name__}"
        result = self.trainer.evaluate_with(
            evaluation, self.model, datamodule=self.datamodule, ckpt_path=self.trainer.best_checkpoint
        )
        self._print(result, evaluation.context.comparison, seconds, report.dir)

    def after_evaluate(self) -> None:
        """Print the result of ``evaluate``."""
        self._print(self._evaluated, {}, {}, str(self._get(self.config, "report_dir")))

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand not in ("evaluate", "remeasure", "plan", "export"):
            super()._run_subcommand(subcommand)
            return
        kwargs = self._prepare_subcommand_kwargs(subcommand)
        if subcommand == "plan":
            for part in plan_tables(self.trainer.plan(**kwargs).to_dict()):
                wide_console().print(part)
            return
        if subcommand == "export":
            for written in self.trainer.export(**kwargs):
                print(
                    f"{written.path}: {written.num_bytes:,} bytes, any batch size; largest difference to the model "
                    f"{written.difference:.1e}, {kwargs['tolerance']:g} allowed"
                )
            return
        if subcommand == "remeasure":
            score = self.trainer.remeasure(**kwargs)
            if self.trainer.is_global_zero:
                Console().print(saved_table(score))
            return
        report = self._report_options()
        if kwargs.get("attacks") is None and report is not None:
            kwargs["attacks"] = report.attacks
        self._evaluated = self.trainer.evaluate(**kwargs)
        self.after_evaluate()

    def _report_options(self) -> ReportOptions | None:
        options = self._get(self.config_init, "report")
        return options if isinstance(options, ReportOptions) or options is None else ReportOptions(**vars(options))

    def _evaluations(self) -> list[RobustEvaluation]:
        return [callback for callback in self.trainer.callbacks if isinstance(callback, RobustEvaluation)]

    def _history(self, report: Path) -> list[dict[str, float]]:
        """Return the curves of the fit that just ended."""
        for callback in self._evaluations():
            if callback.history:
                return callback.history
        # the fork and spawn launchers train in workers whose callbacks do not come back; their report does
        fresh = report.exists() and report.stat().st_mtime >= self._started
        history: list[dict[str, float]] = json.loads(report.read_text()).get("history", []) if fresh else []
        return history

    def _train_control(self, report: ReportOptions) -> tuple[EvaluationResult, float]:
        """Train and judge the same module without AdversarialTraining, away from the user's loggers and checkpoints."""
        names = ("config_init", "datamodule", "model", "trainer", "save_config_callback")
        kept = {name: getattr(self, name) for name in names}
        folder = Path(report.dir) / "control"
        try:
            self.save_config_callback = None
            self._trainer_overrides = {"logger": False, "default_root_dir": str(folder)}
            self._set_seed()
            self.instantiate_classes()
            # early stopping would end the control before it has learnt anything, if it watches robust accuracy
            left_out = (AdversarialTraining, EarlyStopping)
            self.trainer.callbacks = [c for c in self.trainer.callbacks if not isinstance(c, left_out)] + [Stopwatch()]
            for callback in self.trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback.dirpath = str(folder / "checkpoints")
            self.trainer.fit(self.model, datamodule=self.datamodule)
            seconds = Stopwatch.read(self.trainer)
            evaluation = self.trainer.judge(report.attacks, str(folder), report.max_samples)
            evaluation.context.title = f"Control: {self._ORDINARY} of {type(self.model).__name__}"
            # the last weights: a monitor of robust accuracy would pick an epoch before the model learnt anything
            return self.trainer.evaluate_with(evaluation, self.model, datamodule=self.datamodule), seconds
        finally:
            self._trainer_overrides = {}
            for name, value in kept.items():
                setattr(self, name, value)

    def _print(
        self,
        result: EvaluationResult,
        comparison: dict[str, EvaluationResult],
        seconds: dict[str, float],
        directory: str,
    ) -> None:
        if not self.trainer.is_global_zero:
            return
        console = Console()
        if comparison:
            console.print(comparison_table({**comparison, self._ADVERSARIAL: result}, seconds, self._ADVERSARIAL))
        else:
            console.print(evaluation_table(result, "Robust evaluation"))
        console.print(f"report: {Path(directory) / 'report.html'}", soft_wrap=True)


class _SaveConfig(SaveConfigCallback):
    """Saves the parsed configuration beside the logs; without a logger that would be the user's own folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save, if there is a logger."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def run_lightning_cli(args: Sequence[str] | None, description: str) -> None:
    """Parse ``args`` and run the verb in it."""
    quiet = {"exit_on_error": False}
    main = {"prog": "robustdist", "description": description, **quiet}
    RobustCLI(
        LightningModule,
        None,  # any data module, or none: modules may have loaders of their own
        save_config_callback=_SaveConfig,
        trainer_class=RobustTrainer,
        subclass_mode_model=True,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={**main, **{verb: dict(quiet) for verb in RobustCLI.subcommands()}},
        args=None if args is None else list(args),
    )
