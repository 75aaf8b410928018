"""An unmodified classifier loses half of its channels while it is fine-tuned; the small model loads from its file."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.classifiers import SmallConvNet  # any LightningModule: this one imports nothing of robustdist
from robustdist.callbacks import StructuredPruning
from robustdist.data import DigitsDataModule
from robustdist.pruning import load_pruned


def trainer(max_epochs: int, callbacks: list, **options) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", max_epochs=max_epochs, callbacks=callbacks, logger=False, **options)


def accuracy(model: pl.LightningModule, data: DigitsDataModule) -> float:
    x, y = data.parts.test.tensors
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def num_params(model: pl.LightningModule) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main(max_epochs: int = 10) -> dict[str, tuple[int, float]]:
    pl.seed_everything(0)
    data = DigitsDataModule()
    model = SmallConvNet(image_size=8)
    trainer(max_epochs, [], enable_checkpointing=False).fit(model, datamodule=data)
    results = {"dense": (num_params(model), accuracy(model, data))}

    # units are masked by the gradients of training, cut in the middle of the fit, and training goes on without them
    pruning = StructuredPruning(target={"width": 0.5}, schedule={"kind": "cubic", "start": 0.1, "end": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        saved = ModelCheckpoint(dirpath=folder, filename="small")
        trainer(max_epochs, [pruning, saved]).fit(model.train(), datamodule=data)
        results["pruned"] = num_params(model), accuracy(model, data)

        # needs neither the callback nor torch-pruning
        small = load_pruned(SmallConvNet, Path(folder) / "small.ckpt", image_size=8)
    results["loaded"] = num_params(small), accuracy(small, data)
    for name, (size, right) in results.items():
        print(f"{name}: {size:,} parameters, accuracy {right:.3f}")
    return results


if __name__ == "__main__":
    main()
