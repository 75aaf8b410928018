"""A random two-layer BERT and batches for it: Hugging Face's own classes, made without a download."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

PAD, CLS, SEP = 0, 1, 2
VOCABULARY = 40


def tiny_bert(seed: int = 0, **options: Any) -> nn.Module:
    """Return a BertForSequenceClassification with two layers and random weights; without dropout unless asked for."""
    from transformers import BertConfig, BertForSequenceClassification

    dropout = options.pop("dropout", 0.0)
    defaults: dict[str, Any] = {"vocab_size": VOCABULARY, "num_labels": 3, **options}
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        # larger than BERT's own 0.02, so that a random model already tells tokens apart
        initializer_range=0.4,
        **defaults,
    )
    torch.manual_seed(seed)
    return BertForSequenceClassification(config)


def texts(lengths: list[int], padded: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of random sentences, [CLS] words [SEP] padding; the label shows in the words."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) if padded is None else padded
    ids = torch.full((len(lengths), width), PAD)
    labels = torch.randint(0, 3, (len(lengths),), generator=generator)
    for row, length in enumerate(lengths):
        words = torch.randint(4, VOCABULARY, (max(lengths),), generator=generator)[:length]
        words[1::3] = 4 + labels[row]
        words[0], words[-1] = CLS, SEP
        ids[row, :length] = words
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


class TextClassifier(pl.LightningModule):
    """Knows nothing of robustdist: a Hugging Face model that computes its own loss."""

    def __init__(self, seed: int = 0, lr: float = 0.1, **options: Any) -> None:
        super().__init__()
        self.model = tiny_bert(seed, **options)
        self.lr = lr

    def forward(self, batch):
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.model(**batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
