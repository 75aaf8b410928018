"""Fine-tune a Hugging Face encoder that withstands small changes of its embeddings; four domains, the worst one counts.

    python -m examples.robust_text MODEL vaderSentiment-3.3.2.tar.gz

MODEL is the name or folder of an encoder. The sentences come from the source distribution of vaderSentiment:
pip download --no-deps --no-binary=:all: vaderSentiment==3.3.2
"""

import sys

import lightning.pytorch as pl

from examples.text_classifier import TextClassifier
from robustdist.attacks import Embeddings, LinearRamp, TokenPGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.data import VADERDataModule
from robustdist.objectives import DAT


def main(model: str, source: str, **sizes: int) -> list[float]:
    pl.seed_everything(0)
    data = VADERDataModule(tokenizer=model, source=source, **sizes)
    module = TextClassifier(model, trained_layers=2)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    training = AdversarialTraining(
        DAT(clean_weight=1.0),
        TokenPGD(eps=0.02, steps=2),
        eps_schedule=LinearRamp(share=0.3),
        space=Embeddings(),
    )
    trainer = pl.Trainer(max_epochs=2, gradient_clip_val=1.0, callbacks=[training], limit_val_batches=0, **options)
    trainer.fit(module, datamodule=data)
    evaluation = RobustEvaluation({"token_pgd10": TokenPGD(eps=0.02, steps=10)}, space=Embeddings())
    pl.Trainer(callbacks=[evaluation], **options).test(module, datamodule=data)
    for domain, score in zip(data.domains, evaluation.result.loaders, strict=True):
        print(f"{domain:7s} clean {score.clean_acc:.3f}  under attack {score.robust_acc:.3f}")
    return [score.robust_acc for score in evaluation.result.loaders]


if __name__ == "__main__":
    main(*sys.argv[1:3])
