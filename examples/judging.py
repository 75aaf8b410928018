"""Judge a trained model: several attacks, worst case per image, a report with pictures."""

import lightning.pytorch as pl

from examples.classifiers import SmallConvNet
from robustdist.attacks import PGD, TorchAttack
from robustdist.callbacks import RobustEvaluation
from robustdist.data import DigitsDataModule


def main() -> None:
    pl.seed_everything(0)
    model, data = SmallConvNet(image_size=8), DigitsDataModule(batch_size=100)
    judge = RobustEvaluation(
        attacks={
            "pgd20": PGD(eps=0.1, steps=20),
            "margin": PGD(eps=0.1, steps=20, attack_loss="margin", restarts=3),
            "apgdt": TorchAttack("APGDT", norm="linf", eps=0.1, steps=20),
        },
        report_dir="robustdist_report/judging",
        every_n_epochs=5,
    )
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=5, logger=False, callbacks=[judge])
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    print(f"worst case over all attacks: {judge.result.robust_acc:.3f}")


if __name__ == "__main__":
    main()
