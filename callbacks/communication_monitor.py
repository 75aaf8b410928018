"""Logs what the communication of gradients costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robustdist._lightning import Callback, LightningModule, Trainer
from robustdist.errors import UsageError

__all__ = ["CommunicationMonitor"]


class CommunicationMonitor(Callback):
    """Logs bytes and waiting times of a strategy that counts them, such as ``CompressedDDPStrategy``.

    Of the last synchronised step: ``comm/bytes_sent`` by this process, ``comm/bytes_dense`` that an all-reduce of
    float32 would have sent, ``comm/ratio``, the second over the first, and ``comm/wait_ms``, for which backward waited
    for the network after its own work. With a bit controller ``comm/bits`` too, those of the next step. The Trainer's
    ``log_every_n_steps`` says how often they reach the logger.

    Raises:
        UsageError: In ``fit`` if the strategy does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that do not count."""
        if stage == "fit" and self._counter(trainer) is None:
            raise UsageError(
                f"CommunicationMonitor has nothing to log with {type(trainer.strategy).__name__}, which does not count "
                "bytes: use strategy='ddp_compressed', or leave the callback out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count."""
        self._last = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step, if there was one: of several accumulated batches the last one is synchronised."""
        comm_stats = self._counter(trainer)
        if comm_stats is None:
            return
        stats = comm_stats()
        steps, sent, dense, wait = (
            stats.get(key, 0.0) - self._last.get(key, 0.0)
            for key in ("steps", "bytes_sent", "bytes_dense", "wait_seconds")
        )
        if not steps:
            return
        self._last = stats
        figures = {
            "comm/bytes_sent": float(sent),
            "comm/bytes_dense": float(dense),
            "comm/ratio": dense / sent if sent else 1.0,
            "comm/wait_ms": 1000 * wait,
        }
        bits = getattr(trainer.strategy, "chosen_bits", None)
        if bits is not None:
            figures["comm/bits"] = float(bits)
        # of this process: an average over processes would be one more message per step
        pl_module.log_dict(figures, on_step=True, on_epoch=False, rank_zero_only=True)

    @staticmethod
    def _counter(trainer: Trainer) -> Callable[[], dict[str, float]] | None:
        return getattr(trainer.strategy, "comm_stats", None)
