"""A substitute that learns the model's answers, for attacks that see the model from outside only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks.functional import random_start
from robustdist.core.forward import guarded_logits
from robustdist.core.guard import forked_rng
from robustdist.core.rng import Noise, derive_seed
from robustdist.diagnostics.subset import Subset
from robustdist.diagnostics.threat import Threat

__all__ = ["distilled"]

_ROUNDS = 150
_BATCH = 64
_LEARNING_RATE = 3e-3


def distilled(subset: Subset, threat: Threat) -> nn.Module:
    """Return a small net trained to predict what the judged model answers near the images of ``subset``.

    Every round asks the model for its predictions on images with noise from the threat model; the true labels are not
    used. The same on every process that has the same images.

    References:
        Papernot et al., "Practical Black-Box Attacks against Machine Learning".
    """
    first = subset.parts[0]
    classes = guarded_logits(subset.module, first.forward, first.x).shape[1]
    seed = derive_seed(threat.reference.seed, "substitute")
    with torch.inference_mode(False), torch.enable_grad(), forked_rng(first.x.device, seed):
        net = _small_net(first.x, classes).to(first.x.device)
        optimizer = torch.optim.Adam(net.parameters(), _LEARNING_RATE)
        for step in range(_ROUNDS):
            part = subset.parts[step % len(subset.parts)]
            images = part.x
            if not part.whole:
                images = images[torch.randint(len(images), (min(_BATCH, len(images)),)).to(images.device)]
            x, answers = _asked(subset, part.forward, images, threat, step)
            optimizer.zero_grad()
            F.cross_entropy(net(x.float()), answers).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return net.requires_grad_(False).eval()


def _asked(
    subset: Subset, forward: Callable[[Tensor], Any], x: Tensor, threat: Threat, step: int
) -> tuple[Tensor, Tensor]:
    """Return images with noise in the units of ``x``, and the model's predictions on them."""
    reference = threat.reference
    pixels = reference.to_pixels(x)
    noise = Noise(reference.seed, step=step)
    noisy = random_start(pixels, threat.eps, reference.norm, reference.bounds, noise, "substitute")
    # half of them as they are: the decision at the images themselves matters most
    noisy = torch.where((torch.arange(len(x), device=x.device) % 2 == 0).view(-1, *[1] * (x.dim() - 1)), pixels, noisy)
    inputs = reference.from_pixels(noisy, like=x)
    return inputs.detach().clone(), guarded_logits(subset.module, forward, inputs).argmax(1)


def _small_net(x: Tensor, classes: int) -> nn.Module:
    if x.dim() != 4:
        return _InFloat32(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 128), nn.ReLU(), nn.Linear(128, classes)))
    return _InFloat32(
        nn.Sequential(
            nn.Conv2d(x.shape[1], 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(7),
            nn.Flatten(),
            nn.Linear(32 * 49, classes),
        )
    )


class _InFloat32(nn.Module):
    """Takes inputs of any number format."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.float()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.float())
        return logits
