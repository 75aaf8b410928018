"""An ordinary LightningModule around a Hugging Face encoder; it knows nothing of adversarial training."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torchmetrics.functional import accuracy
from transformers import AutoModelForSequenceClassification


class TextClassifier(pl.LightningModule):
    """Fine-tunes a sequence classifier on batches of ``input_ids``, ``attention_mask`` and ``labels``.

    Args:
        model: Name or folder of a Hugging Face model.
        num_labels: Number of classes.
        trained_layers: How many of the last encoder layers are trained, besides pooler and classifier; None for the
            whole model. For encoders that name their layers ``encoder.layer.<number>``, as BERT does.
        lr: Largest learning rate of a one-cycle schedule.
    """

    def __init__(self, model: str, num_labels: int = 2, trained_layers: int | None = None, lr: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels)
        self.model.train()
        if trained_layers is not None:
            last = self.model.config.num_hidden_layers
            kept = [f"encoder.layer.{place}." for place in range(last - trained_layers, last)]
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(any(part in name for part in [*kept, "pooler", "classifier"]))

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate(batch, "test")

    def _evaluate(self, batch, stage):
        logits = self(batch["input_ids"], batch["attention_mask"])
        value = accuracy(logits, batch["labels"], task="multiclass", num_classes=logits.shape[1])
        self.log(f"{stage}_acc", value, prog_bar=True, batch_size=len(logits))
        self.log(f"{stage}_loss", F.cross_entropy(logits, batch["labels"]), batch_size=len(logits))

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.lr,
            total_steps=max(2, int(self.trainer.estimated_stepping_batches)),
            pct_start=0.1,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
