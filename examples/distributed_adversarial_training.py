"""DAT: each process attacks its own share of a large batch; LALR keeps the layers' steps in proportion."""

import lightning.pytorch as pl
from torch.optim.lr_scheduler import OneCycleLR

from examples.classifiers import SmallConvNet
from robustdist.attacks import FGSM, PGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.data import DigitsDataModule
from robustdist.objectives import DAT
from robustdist.optim import LALR

EPS = 0.1


class LargeBatchNet(SmallConvNet):
    """The ordinary classifier with another optimiser."""

    def configure_optimizers(self):
        optimizer = LALR(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.02, steps), "interval": "step"}]


def main() -> None:
    oracles = {
        "DAT-PGD": (DAT(clean_weight=1.0), PGD(eps=EPS, steps=5)),
        "DAT-FGSM": (DAT(clean_weight=0.0), FGSM(eps=EPS, step_size=1.25 * EPS, random_start=True)),
    }
    for name, (objective, attack) in oracles.items():
        pl.seed_everything(0)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp_fork",
            max_epochs=20,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[
                AdversarialTraining(objective, attack),
                RobustEvaluation(attacks={"pgd20": PGD(eps=EPS, steps=20)}, every_n_epochs=20),
            ],
        )
        trainer.fit(LargeBatchNet(image_size=8), datamodule=DigitsDataModule(batch_size=128))
        metrics = trainer.callback_metrics
        print(f"{name}: clean {metrics['robust/clean_acc']:.3f}, PGD-20 {metrics['robust/acc']:.3f}")


if __name__ == "__main__":
    main()
