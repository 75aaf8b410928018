"""Concurrent adversarial learning: adversarial examples from weights of some steps ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.guard import unchanged_buffers
from robustdist.errors import UsageError
from robustdist.objectives.base import Objective, ObjectiveContext

__all__ = ["ConAdv"]


class ConAdv(Objective):
    r"""The ordinary loss on clean and on adversarial inputs, the latter made with weights of ``stale`` steps ago.

    .. math:: \min_\theta \ell(\theta; x, y) + \ell(\theta; x + \delta_{t - \tau}, y), \quad
              \delta_{t - \tau} \approx \arg\max_\delta \ell(\theta_{t - \tau}; x + \delta, y)

    An attack that does not need the newest weights can run beside the update, which takes the inner problem out of the
    critical path of large-batch training. Here it runs before the update, on the same device: this class gives what the
    method computes, staleness and loss, not its speed. ``stale=0`` is ``DAT(clean_weight=1)``; the first ``stale``
    steps use the oldest weights there are, those of the first step.

    Both streams have statistics of their own: the buffers of the module (running means of batch norm) see the clean
    stream alone, which is the one that the model is evaluated on; the adversarial pass normalises by its own batch and
    leaves the buffers as they were. Only trained parameters are kept, ``stale`` copies of them, also in checkpoints.

    Args:
        stale: Steps :math:`\tau` between the weights that are attacked and those that learn, at least 0. With gradient
            accumulation a step is a batch, so that fewer updates lie between.
        clean_weight: Weight of the clean loss, at least 0.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Liu et al., "Concurrent Adversarial Learning for Large-Batch Training".
    """

    needs_second_pass = True

    def __init__(self, stale: int = 1, clean_weight: float = 1.0) -> None:
        if isinstance(stale, bool) or not isinstance(stale, int) or stale < 0:
            raise UsageError(f"stale={stale!r} must be a whole number that is not negative")
        if not 0 <= clean_weight < float("inf"):
            raise UsageError(f"clean_weight={clean_weight} must be a finite number that is not negative")
        self.stale = stale
        self.clean_weight = clean_weight
        # oldest first: the weights of the last ``stale`` steps, by name
        self._past: deque[dict[str, Tensor]] = deque(maxlen=stale)
        self._trained: dict[str, nn.Parameter] = {}

    def compute(self, context: ObjectiveContext) -> Tensor | None:
        """Return the clean loss plus the loss at the adversarial inputs of stale weights."""
        trained = {name: p for name, p in context.module.named_parameters() if p.requires_grad}
        with _in_place_of(trained, self._past[0] if self._past else {}):
            x_adv = context.attack(context.x, context.y)
        self._trained = trained
        clean = context.loss(context.x)
        if clean is None:
            return None
        with unchanged_buffers(context.module):
            robust = context.loss(x_adv)
        if robust is None:
            return None
        context.logs.update(clean_loss=clean.detach(), adv_loss=robust.detach())
        return self.clean_weight * clean + robust

    def after_backward(self) -> None:
        """Keep the weights of this step, before the optimiser changes them."""
        if self.stale and self._trained:
            self._past.append({name: parameter.detach().clone() for name, parameter in self._trained.items()})
        self._trained = {}

    def reset(self) -> None:
        """Forget all past weights."""
        self._past.clear()
        self._trained = {}

    def follow_pruning(self, slice_like: Callable[[str, Tensor], Tensor | None]) -> None:
        """Cut the past weights; ``slice_like`` as in :meth:`Objective.follow_pruning`."""
        for past in self._past:
            cut = {name: slice_like(name, values) for name, values in past.items()}
            past.clear()
            past.update({name: values for name, values in cut.items() if values is not None})

    def state_dict(self) -> dict[str, Any]:
        """Return the past weights, equal on all processes."""
        return {"past": [{name: values.cpu() for name, values in past.items()} for past in self._past]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the past weights of the checkpoint."""
        self._past = deque(state.get("past", []), maxlen=self.stale)


@contextmanager
def _in_place_of(trained: dict[str, nn.Parameter], past: dict[str, Tensor]) -> Iterator[None]:
    """Let past values stand in for parameters; put the present ones back, as the same tensors."""
    present = {name: parameter.data for name, parameter in trained.items()}
    try:
        for name, values in past.items():
            if name in trained:
                trained[name].data = values.to(trained[name].data)
        # autocast keeps the weights that it has cast
        torch.clear_autocast_cache()
        yield
    finally:
        for name, parameter in trained.items():
            parameter.data = present[name]
        torch.clear_autocast_cache()
