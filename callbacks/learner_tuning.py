"""Fine-tuning of an unmodified LightningModule through learners."""

from __future__ import annotations

from typing import Any

from robustdist._lightning import Callback, LightningModule, Trainer, WeightAveraging, rank_zero_info, rank_zero_warn
from robustdist.core.ranks import failing_together
from robustdist.core.redirect import sharding_of
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.learners import Learners
from robustdist.learners.pair import paired_layers, unmerged
from robustdist.learners.selection import ALL_LINEAR, ATTENTION, HEAD, Patterns
from robustdist.learners.tuning import Method
from robustdist.strategies import CompressedDDPStrategy, QuantizedDataStrategy
from robustdist.strategies.rewrap import rewrap

__all__ = ["LearnerTuning"]


class LearnerTuning(Callback):
    r"""Trains low-rank pairs beside frozen linear layers, attention with them while priming, and the head in full.

    .. math:: y = x W + b + x P_1 P_2, \qquad P_1 \in R^{in \times r}, \; P_2 \in R^{r \times out}

    :math:`P_2` starts at zero. In the first ``priming_epochs`` epochs the linear layers of attention are trained too,
    then they are frozen, and under DDP the module gets a new wrapper, so that their gradients are neither computed nor
    sent. At the end of fit, also of an interrupted one, the pairs are merged, W + P1 P2, and the module is plain again.

    Checkpoints have the keys of the plain module and the merged weights. What an exact continuation needs besides,
    weights and pairs apart, is in the state of this callback.

    The optimiser is the module's own, over ``self.parameters()`` or those that require a gradient, with one learning
    rate for all. Pairs want a higher one than full fine-tuning.

    Args:
        rank: The rank r, at least 1.
        priming_epochs: Epochs in which attention is trained too; fewer than the run has, 0 for no priming.
        targets: "all-linear" for every linear layer outside the head, or regular expressions that are searched for in
            the dotted names of the LightningModule's layers.
        head: The same for what is trained in full; the default knows usual names (classifier, pooler, head, fc, ...).
            None for no head.
        prime: The same for the linear layers, weight and bias, that are trained while priming.
        alpha: None for learners; a number multiplies the pairs' output by alpha / rank, as in LoRA.
        method: "learners"; for comparison without pairs "bitfit" (all biases and the head) and "freeze_ffn" (the
            layers of ``prime`` and the head).
        seed: Seed of P1.

    Attributes:
        learners: The torch-only part; attached to the module during fit.

    Raises:
        UsageError: If an argument is out of range; at setup for sharded strategies, patterns without a match, priming
            that leaves no epoch, averaging callbacks listed before this one; when fit starts if no optimiser holds a
            trained parameter; for a checkpoint with other pairs.

    References:
        Vucetic et al., "Efficient Fine-Tuning of Compressed Language Models with Learners".

    Example:
        >>> LearnerTuning(rank=16, priming_epochs=1, targets="query|value").learners.rank
        16
    """

    def __init__(
        self,
        rank: int = 64,
        priming_epochs: int = 2,
        *,
        targets: Patterns = ALL_LINEAR,
        head: Patterns | None = HEAD,
        prime: Patterns = ATTENTION,
        alpha: float | None = None,
        method: Method = "learners",
        seed: int = 0,
    ) -> None:
        if isinstance(priming_epochs, bool) or not isinstance(priming_epochs, int) or priming_epochs < 0:
            raise UsageError(f"priming_epochs={priming_epochs!r} must be a whole number of at least 0")
        self.learners = Learners(rank, targets=targets, head=head, prime=prime, alpha=alpha, method=method, seed=seed)
        self.priming_epochs = priming_epochs if method == "learners" else 0
        self._priming = self._looked = False
        self._trainer: Trainer | None = None
        self._final: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the pairs into the module and freeze the rest, before DDP wraps it and optimisers are made."""
        if stage != "fit":
            return
        self._finish()
        self._final, self._looked = {}, False
        with failing_together():
            self._check(trainer)
            self._priming = self.priming_epochs > 0
            self.learners.attach(pl_module, priming=self._priming)
        self._trainer = trainer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that the optimisers hold what is trained, and say what that is."""
        held = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        trained = self.learners.trained()
        left_out = [name for name, parameter in trained.items() if id(parameter) not in held]
        with failing_together():
            if left_out:
                raise UsageError(
                    f"no optimizer holds {left_out[0]} ({len(left_out)} of {len(trained)} trained parameters are left "
                    "out): hand self.parameters() to the optimizer in configure_optimizers"
                )
        self._tell(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End priming if a checkpoint from after it is continued; in the middle of an epoch there is no other hook."""
        self._follow(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End priming when its epochs are over."""
        self._follow(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Look once whether all pairs take part; several optimisers may step different parts of a module."""
        if self._looked or len(trainer.optimizers) > 1:
            return
        self._looked = True
        silent = self.learners.silent()
        if silent:
            rank_zero_warn(
                f"the pair beside {silent[0]} ({len(silent)} in all) got no gradient in the first step: either the "
                "layer is not called as a module, or re-entrant activation checkpointing cuts it off (set "
                "use_reentrant=False); name other layers in targets if this is right",
                category=RobustDistWarning,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say if learners were never trained alone."""
        if self._priming:
            rank_zero_warn(
                f"training ended within priming_epochs={self.priming_epochs}: attention was trained to the end",
                category=RobustDistWarning,
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge; averaged weights have been put into the module by now."""
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Merge what there is: an interrupted fit leaves a plain module too."""
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Return weights and pairs apart; after fit those of its end."""
        return self._final if self.learners.module is None else self.learners.state_dict()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add weights and pairs of averages."""
        averages = [{"layers": unmerged(average)} for average in _averages(trainer)]
        if averages:
            checkpoint["callbacks"][self.state_key]["averages"] = averages

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take weights and pairs apart again, in the module and in averages of it."""
        if self.learners.module is None or self._trainer is None:
            return
        self.learners.load_state_dict(state_dict)
        for average, state in zip(_averages(self._trainer), state_dict.get("averages", []), strict=False):
            self.learners.load_state_dict({**state_dict, **state}, average)

    def _follow(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._priming and trainer.current_epoch >= self.priming_epochs:
            self._priming = False
            self.learners.end_priming()
            rewrap(trainer)
            self._tell(pl_module)

    def _finish(self) -> None:
        if self.learners.module is not None:
            self._final = self.learners.state_dict()
            self.learners.merge()
        self._trainer = None

    def _check(self, trainer: Trainer) -> None:
        sharded = sharding_of(trainer.strategy)
        if sharded is not None:
            raise UsageError(f"LearnerTuning merges whole weights, and {sharded} shards them: use strategy='ddp'")
        epochs = trainer.max_epochs
        if epochs is not None and 0 <= epochs <= self.priming_epochs:
            raise UsageError(
                f"priming_epochs={self.priming_epochs} leaves none of max_epochs={epochs} to the learners alone: "
                "reduce priming_epochs, or train longer"
            )
        if self.priming_epochs and isinstance(trainer.strategy, (CompressedDDPStrategy, QuantizedDataStrategy)):
            raise UsageError(
                f"priming_epochs={self.priming_epochs} needs a new wrapper in mid-fit, at which "
                f"{type(trainer.strategy).__name__} would lose its memory: set priming_epochs=0, or use strategy='ddp'"
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        before = [c for c in callbacks[: callbacks.index(self)] if isinstance(c, WeightAveraging)]
        if before:
            raise UsageError(
                f"callbacks: {type(before[0]).__name__} copies the module before the learners are in it: "
                "list LearnerTuning first"
            )

    def _tell(self, pl_module: LightningModule) -> None:
        trained, every = sum(p.numel() for p in self.learners.trained().values()), list(pl_module.parameters())
        total = sum(p.numel() for p in every)
        pairs = len(paired_layers(pl_module))
        phase = f"; the first {self.priming_epochs} epochs prime" if self._priming else ""
        rank_zero_info(
            f"LearnerTuning(method={self.learners.method!r}): {pairs} pairs of rank {self.learners.rank}, {trained:,} "
            f"of {total:,} parameters trained ({100 * trained / total:.1f} %){phase}"
        )


def _averages(trainer: Trainer) -> list[Any]:
    """Return the averaged copies of the module, in the order of their callbacks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    models = [c._average_model for c in callbacks if isinstance(c, WeightAveraging)]
    return [model.module for model in models if model is not None]
