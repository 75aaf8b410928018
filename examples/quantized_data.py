"""Samples in a few bits instead of gradients: bytes per step for a small and a large net, and the accuracy it costs."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torchvision.models import resnet18

from examples.classifiers import SmallConvNet
from robustdist.comm import QSGD, Compressor, Identity, SampleQuantizer
from robustdist.comm.cost import choose, sent_bytes
from robustdist.comm.sample_exchange import HEADER_BYTES
from robustdist.comm.samples import Entry
from robustdist.data import FashionMNISTDataModule
from robustdist.strategies import CompressedDDPStrategy, QuantizedDataStrategy

PROCESSES, BATCH_SIZE, NUM_CLASSES = 2, 50, 10


def of_gradients(codec: Compressor, numel: int) -> float:
    """Bytes that a process sends in a step for a gradient of ``numel`` elements."""
    return sent_bytes(codec, numel, PROCESSES, choose(codec, numel, PROCESSES))


def of_samples(bits: int) -> float:
    """Bytes that a process sends in a step for its batch: no matter how large the net is."""
    shapes = (BATCH_SIZE, *FashionMNISTDataModule.input_shape), (BATCH_SIZE,)
    entries = [Entry(shapes[0], torch.float32), Entry(shapes[1], torch.int64)]
    payload = SampleQuantizer(bits, num_classes=NUM_CLASSES).payload_bytes(entries)
    return (PROCESSES - 1) * (payload + HEADER_BYTES)


def accuracy(strategy: Strategy, num_train: int, max_epochs: int, seed: int) -> float:
    """Train the small net and return its accuracy on the validation images."""
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=strategy,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SmallConvNet(), datamodule=FashionMNISTDataModule(BATCH_SIZE, num_train=num_train))
    return float(trainer.callback_metrics["val_acc"])


def main(num_train: int = 5000, max_epochs: int = 4, seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """Print the table and return its rows: bytes for the small and the large net, accuracy of the small one."""
    with torch.device("meta"):
        nets = SmallConvNet().net, resnet18(num_classes=NUM_CLASSES)
    sizes = [sum(parameter.numel() for parameter in net.parameters()) for net in nets]
    rows: dict[str, tuple[Strategy, float, Compressor | None]] = {
        "gradients, float32": (DDPStrategy(start_method="fork"), 0, Identity()),
        "gradients, QSGD 4 bits": (CompressedDDPStrategy(QSGD(4), start_method="fork"), 0, QSGD(4)),
    }
    for bits, refine in ((8, False), (4, False), (2, False), (1, False), (1, True)):
        strategy = QuantizedDataStrategy(bits, num_classes=NUM_CLASSES, refine=refine, start_method="fork")
        name = f"samples, {bits} bit{'s' * (bits > 1)}{', refine' * refine}"
        rows[name] = strategy, of_samples(bits), QSGD(2) if refine else None
    results = {}
    print(f"{'sent per step':26}{f'{sizes[0]:,} parameters':>20}{f'{sizes[1]:,} parameters':>24}{'accuracy':>10}")
    for name, (strategy, samples, codec) in rows.items():
        small, large = (samples + (of_gradients(codec, numel) if codec else 0) for numel in sizes)
        results[name] = small, large, accuracy(strategy, num_train, max_epochs, seed)
        print(f"{name:26}{small / 1000:>17,.1f} kB{large / 1000:>21,.1f} kB{results[name][2]:>10.3f}")
    return results


if __name__ == "__main__":
    main()
