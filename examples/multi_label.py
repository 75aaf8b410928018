"""Several labels per image: a module with binary cross-entropy is attacked by the loss of its own training step."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import SmallConvNet
from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining
from robustdist.data import DigitsDataModule

EPS = 0.1


class DigitProperties(pl.LightningModule):
    """Says of a digit whether it is above four and whether it is even; knows nothing of attacks."""

    def __init__(self):
        super().__init__()
        self.net = SmallConvNet(image_size=8, num_classes=2).net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y, pos_weight=torch.tensor([1.5, 1.0]))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def with_labels(digits: TensorDataset) -> TensorDataset:
    x, y = digits.tensors
    return TensorDataset(x, torch.stack([y > 4, y % 2 == 0], 1).float())


def both_right(model, x, y) -> float:
    with torch.no_grad():
        return float(((model.eval()(x) > 0) == y.bool()).all(1).float().mean())


def main(max_epochs: int = 20) -> dict[str, tuple[float, float]]:
    parts = DigitsDataModule().parts
    # named, because input and target are both floating-point tensors
    adversarial = AdversarialTraining(
        attack=PGD(eps=EPS, steps=5),
        attack_loss="training_step",
        input_key=0,
        target_key=1,
        eps_schedule=LinearRamp(share=0.3),
    )
    results = {}
    for name, callbacks in {"ordinary": [], "adversarial": [adversarial]}.items():
        pl.seed_everything(0)
        model = DigitProperties()
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=max_epochs, logger=False, enable_checkpointing=False, callbacks=callbacks
        )
        trainer.fit(model, DataLoader(with_labels(parts.train), batch_size=100, shuffle=True))
        x, y = with_labels(parts.test).tensors
        judge = PGD(eps=EPS, steps=20, attack_loss=lambda z, y: F.binary_cross_entropy_with_logits(z, y))
        results[name] = both_right(model, x, y), both_right(model, judge(model, x, y), y)
        print(f"{name}: both labels right {results[name][0]:.3f}, under attack {results[name][1]:.3f}")
    return results


if __name__ == "__main__":
    main()
