"""A number per image: the angle by which a digit is turned, from a module that says itself what an attack increases."""

import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import SmallConvNet
from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining
from robustdist.data import MNIST5kDataModule

EPS, LARGEST = 0.1, 45.0  # pixels, degrees


class Angle(pl.LightningModule):
    """Estimates the angle of a digit over the largest one; ``attack_step`` is all it has for robustdist."""

    def __init__(self):
        super().__init__()
        self.net = SmallConvNet(num_classes=2).net  # of two outputs the first is used

    def forward(self, x):
        return self.net(x)[:, 0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.smooth_l1_loss(self(x), y)

    def attack_step(self, batch):
        x, y = batch
        return (self(x) - y).square()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def turned(digits: TensorDataset, seed: int) -> TensorDataset:
    x, _ = digits.tensors
    y = 2 * torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) - 1
    angle = y * math.radians(LARGEST)
    rows = torch.stack([angle.cos(), -angle.sin(), 0 * y, angle.sin(), angle.cos(), 0 * y], 1).view(-1, 2, 3)
    grid = F.affine_grid(rows, list(x.shape), align_corners=False)
    return TensorDataset(F.grid_sample(x, grid, align_corners=False).clamp(0, 1), y)


def error(model, x, y) -> float:
    with torch.no_grad():
        return LARGEST * float((model.eval()(x) - y).abs().mean())


def main(max_epochs: int = 6) -> dict[str, tuple[float, float]]:
    parts = MNIST5kDataModule().parts
    adversarial = AdversarialTraining(
        attack=PGD(eps=EPS, steps=5), input_key=0, target_key=1, eps_schedule=LinearRamp(share=0.3)
    )
    results = {}
    for name, callbacks in {"ordinary": [], "adversarial": [adversarial]}.items():
        pl.seed_everything(0)
        model = Angle()
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=max_epochs, logger=False, enable_checkpointing=False, callbacks=callbacks
        )
        trainer.fit(model, DataLoader(turned(parts.train, 0), batch_size=100, shuffle=True))
        x, y = turned(parts.test, 1).tensors
        judge = PGD(eps=EPS, steps=20, attack_loss=lambda output, y: (output - y).square())
        results[name] = error(model, x, y), error(model, judge(model, x, y), y)
        print(f"{name}: mean error {results[name][0]:.1f} degrees, under attack {results[name][1]:.1f}")
    return results


if __name__ == "__main__":
    main()
