"""DAT with quantised gradients, one-sided and two-sided: what is sent, and what it costs in robust accuracy.

One-sided: the processes send 8 bits, the averages come back as float32. Two-sided: 8 bits both ways.
"""

import lightning.pytorch as pl

from examples.classifiers import SmallConvNet
from robustdist.attacks import FGSM, PGD
from robustdist.callbacks import AdversarialTraining, CommunicationMonitor, RobustEvaluation
from robustdist.comm import QSGD, Identity
from robustdist.data import DigitsDataModule
from robustdist.objectives import DAT
from robustdist.strategies import CompressedDDPStrategy

EPS = 0.1
OBJECTIVES = {
    "DAT-PGD": (DAT(clean_weight=1.0), PGD(eps=EPS, steps=5)),
    "DAT-FGSM": (DAT(clean_weight=0.0), FGSM(eps=EPS, step_size=1.25 * EPS, random_start=True)),
}
# chunked, as with more processes: with two, "auto" would gather, where nothing is averaged before it is sent
COMMUNICATION = {
    "float32": {"compressor": Identity()},
    "8 bits, one side": {"compressor": QSGD(bits=8), "sides": 1, "collective": "chunked"},
    "8 bits, two sides": {"compressor": QSGD(bits=8), "sides": 2, "collective": "chunked"},
}


def train(objective: DAT, attack: FGSM | PGD, max_epochs: int, **options: object) -> dict[str, float]:
    pl.seed_everything(0)
    evaluation = RobustEvaluation(attacks={"pgd20": PGD(eps=EPS, steps=20)}, every_n_epochs=max_epochs)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CompressedDDPStrategy(start_method="fork", **options),
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AdversarialTraining(objective, attack), evaluation, CommunicationMonitor()],
    )
    trainer.fit(SmallConvNet(image_size=8), datamodule=DigitsDataModule(batch_size=32))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def main(max_epochs: int = 10) -> None:
    for name, (objective, attack) in OBJECTIVES.items():
        for communication, options in COMMUNICATION.items():
            metrics = train(objective, attack, max_epochs, **options)
            print(
                f"{name:8s}  {communication:17s}  {metrics['comm/bytes_sent'] / 1000:7.1f} kB per step"
                f"  (1/{metrics['comm/ratio']:.1f})  clean {metrics['robust/clean_acc']:.3f}"
                f"  PGD-20 {metrics['robust/acc']:.3f}"
            )


if __name__ == "__main__":
    main()
