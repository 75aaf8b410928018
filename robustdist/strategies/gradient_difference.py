"""What a gradient lost because its samples were sent as codes, sent after them in two bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from robustdist._lightning import LightningModule
from robustdist.comm.engine import CommEngine
from robustdist.comm.quantize import QSGD
from robustdist.core.guard import forked_rng, unchanged_buffers
from robustdist.core.muted import StepMuter
from robustdist.errors import UsageError

__all__ = ["GradientDifference"]


class GradientDifference:
    r"""Adds the mean over the ranks of :math:`Q(\nabla \ell(w; x_i) - \nabla \ell(w; \hat x_i))` to the gradient.

    Q is unbiased, and so is the sum, whatever the codes of the samples lost; the variance that Q adds is in proportion
    to the difference alone. Two more passes over the own batch per step.

    Args:
        module: The user's module.
        device: Its device.
        bits: Bits per component of the difference.
        seed: Seed of the draws of Q.
    """

    def __init__(self, module: LightningModule, device: torch.device, *, bits: int = 2, seed: int = 0) -> None:
        self.engine = CommEngine(QSGD(bits, seed=seed), error_feedback=False)
        self._module, self._device = module, device
        self._muter = StepMuter()
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._views: dict[str, Tensor] = {}
        self._future: torch.futures.Future[Tensor] | None = None

    def start(self, run: Callable[[Any], Any], own: Any, decoded: Any, *, step: int, seed: int) -> None:
        """Compute the difference and hand it to the communication thread.

        Args:
            run: The user's step: maps a batch to a loss or a mapping with one.
            own: The own batch as the loader gave it.
            decoded: What the others see of it.
            step: Number of the batch.
            seed: Seed of the global draws in both passes.
        """
        losses = []
        with self._muter(self._module), unchanged_buffers(self._module):
            for batch in (own, decoded):
                with forked_rng(self._device, seed):
                    losses.append(_loss_of(run(batch)))
        parameters = self._parameters.values()
        grads = torch.autograd.grad(losses[0] - losses[1], list(parameters), allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        buffer = torch.cat([part.reshape(-1).float() for part in parts])
        pieces = torch.split(buffer, [part.numel() for part in parts])
        self._views = {
            name: piece.view(part.shape) for name, piece, part in zip(self._parameters, pieces, parts, strict=True)
        }
        self._future = self.engine.submit(self._views, buffer, step=step)

    def finish(self, factor: float) -> None:
        """Wait for the mean and add ``factor`` times it to the gradients."""
        if self._future is None:
            return
        self._future.wait()
        self._future = None
        self.engine.settle()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:  # otherwise it took no part, and the difference is zero
                    parameter.grad.add_(self._views[name], alpha=factor)

    def close(self) -> None:
        """End the communication thread."""
        self.engine.close()


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise UsageError(
            "refine=True needs a training_step that returns a loss for every batch, as a tensor or under 'loss': "
            "set refine=False"
        )
    return loss
