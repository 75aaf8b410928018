"""Two ordinary image classifiers: LightningModules as anybody writes them."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Classifier(pl.LightningModule):
    """Cross-entropy training with Adam and a one-cycle learning rate; accuracy in validation and test.

    Args:
        net: Maps images of shape (batch, channels, height, width) to logits.
        num_classes: Number of classes.
        lr: Largest learning rate of the cycle.
    """

    def __init__(self, net: nn.Module, num_classes: int, lr: float):
        super().__init__()
        self.net = net
        self.lr = lr
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy of one batch."""
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log ``val_loss`` and ``val_acc``."""
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        """Log ``test_acc``."""
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        """Return Adam with a one-cycle schedule over all steps of the run."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SmallConvNet(Classifier):
    """Two strided convolutions and two linear layers; 166,406 parameters for 1x28x28.

    Args:
        in_channels: Channels of the images.
        image_size: Height and width of the images, a multiple of 4.
        num_classes: Number of classes.
        lr: Largest learning rate of the cycle.
    """

    def __init__(self, in_channels: int = 1, image_size: int = 28, num_classes: int = 10, lr: float = 5e-3):
        net = nn.Sequential(
            nn.Conv2d(in_channels, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, 100),
            nn.ReLU(),
            nn.Linear(100, num_classes),
        )
        super().__init__(net, num_classes, lr)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around an identity or 1x1 shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated sum of the convolutions and the shortcut."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


class SmallResNet(Classifier):
    """Three residual stages of 16, 32 and 64 channels with BatchNorm; takes images of any size.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        lr: Largest learning rate of the cycle.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, lr: float = 5e-3):
        net = nn.Sequential(
            nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            ResidualBlock(16, 16, stride=1),
            ResidualBlock(16, 32, stride=2),
            ResidualBlock(32, 64, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )
        super().__init__(net, num_classes, lr)
