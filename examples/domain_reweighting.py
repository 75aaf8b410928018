"""Fine-tune on four domains of which one is rare: the plain mix beside ratios that follow the losses.

    python -m examples.domain_reweighting MODEL vaderSentiment-3.3.2.tar.gz

MODEL is the name or folder of a Hugging Face encoder. The sentences come from the source distribution of
vaderSentiment: pip download --no-deps --no-binary=:all: vaderSentiment==3.3.2
"""

import sys

import lightning.pytorch as pl

from examples.text_classifier import TextClassifier
from robustdist.callbacks import DomainReweighting
from robustdist.data import VADERDataModule

METHODS = ("constant", "static_dro", "dro", "sheared")


def train(method: str, model: str, source: str, *, max_steps: int, seed: int, rare: str, **sizes: int) -> list[float]:
    """Return the loss of every domain on the test part."""
    pl.seed_everything(seed)
    data = VADERDataModule(tokenizer=model, source=source, seed=seed, **sizes)
    common = 0.95 / (len(data.domains) - 1)
    reweighting = DomainReweighting(
        method,
        "val_loss",
        domain_ids="domain",
        domain_names=data.domains,
        ratios=[0.05 if domain == rare else common for domain in data.domains],
        seed=seed,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        max_steps=max_steps,
        val_check_interval=max(1, max_steps // 20),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[reweighting],
    )
    module = TextClassifier(model, trained_layers=2, lr=3e-4)
    trainer.fit(module, datamodule=data)
    scores = trainer.test(module, datamodule=data, verbose=False)
    ratios = " ".join(f"{name} {ratio:.3f}" for name, ratio in reweighting.ratios.items())
    print(f"{method:10s} ratios at the end: {ratios}")
    for name in ("loss", "acc"):
        values = [scores[n][f"test_{name}/dataloader_idx_{n}"] for n in range(len(data.domains))]
        print(f"{method:10s} {name}: " + " ".join(f"{value:.3f}" for value in values))
    return [scores[n][f"test_loss/dataloader_idx_{n}"] for n in range(len(data.domains))]


def main(
    model: str, source: str, max_steps: int = 120, seed: int = 0, rare: str = "movie", **sizes: int
) -> dict[str, list[float]]:
    results = {}
    for method in METHODS:
        results[method] = train(method, model, source, max_steps=max_steps, seed=seed, rare=rare, **sizes)
    for method, losses in results.items():
        print(f"{method:10s} worst {max(losses):.3f}  mean {sum(losses) / len(losses):.3f}")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]))
