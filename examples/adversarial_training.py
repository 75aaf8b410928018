"""Make an ordinary LightningModule robust: two callbacks, two processes, nothing else changes."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.classifiers import SmallConvNet
from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.data import DigitsDataModule


def main() -> None:
    pl.seed_everything(0)
    model, data = SmallConvNet(image_size=8), DigitsDataModule(batch_size=50)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        max_epochs=10,
        logger=False,
        callbacks=[
            AdversarialTraining(attack=PGD(eps=0.1, steps=5), eps_schedule=LinearRamp(share=0.3)),
            RobustEvaluation(attacks={"pgd20": PGD(eps=0.1, steps=20)}),
            ModelCheckpoint(dirpath="checkpoints", monitor="robust/acc", mode="max"),
        ],
    )
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    main()
