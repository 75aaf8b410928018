"""One attack call in pixel units: what an attack works on and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustdist.attacks.functional import ascent_step, project, random_start, settle
from robustdist.core.rng import Noise, derive_seed
from robustdist.errors import UsageError
from robustdist.types import Bounds, Norm

__all__ = ["AttackResult", "Evaluated", "Problem"]

_NO_GRAPH = (
    "the model's output does not depend on its input through autograd: "
    "remove no_grad/detach/argmax from forward, or name the differentiable part with the option forward"
)


class AttackResult(NamedTuple):
    """What an attack found.

    Attributes:
        x_adv: Adversarial inputs; shape, dtype, device and memory format of ``x``.
        no_gradient: Shape (batch,), True where the input gradient was zero or non-finite at every step, so that the
            attack had nothing to follow. A robust accuracy built on such samples says nothing.
        stage: For an attack made of several, shape (batch,): the place in ``attack.stages`` of the one that
            succeeded, -1 where none did. None for a single attack.
    """

    x_adv: Tensor
    no_gradient: Tensor
    stage: Tensor | None = None


class Evaluated(NamedTuple):
    """A loss with one value per row (or a scalar), the logits behind it, and its input gradient if there is one."""

    logits: Tensor
    loss: Tensor
    grad: Tensor


@dataclass
class Problem:
    """One attack call in pixel units and at least float32: what ``Attack.perturb`` works on.

    Attributes:
        x: Clean inputs, shape (batch, ...), in pixel units.
        y: Targets as the attack loss takes them; for a targeted attack the classes to reach.
        logits: Maps pixel inputs to logits, shape (batch, classes), at least float32.
        loss: Maps (logits, y) to the loss that the attack increases, one value per sample or a scalar.
        norm, eps, step_size, bounds: The threat model and the step, in pixel units, as schedules and guards made them.
        noise: The only source of randomness.
        loss_scale: Factor on the loss, against underflow in half precision.
        targeted: Whether ``y`` holds the classes to reach.
        rowwise: Whether the logits of a row depend on that row alone, so that rows may be left out.
        whole_eps: The radius before any schedule; with ``step_scale`` for objectives with a step rule of their own.
        step_scale: What schedules and guards made of the step.
        search: A cheaper way to nearly the same logits. What it finds counts only if ``logits`` confirms it.
        rounded: For inputs in half precision: maps points and their clean inputs to the points that will be handed
            out, in pixel units; None where that changes nothing.
        call_size: Rows of the attack call that this is a part of; 0 for all of it.
        followed: Shape (batch,), True where some step had a gradient to follow.
        stage: As in :class:`AttackResult`.
    """

    x: Tensor
    y: Any
    logits: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    norm: Norm
    eps: float
    step_size: float
    bounds: Bounds
    noise: Noise
    loss_scale: float = 1.0
    targeted: bool = False
    rowwise: bool = True
    whole_eps: float = 0.0
    step_scale: float = 1.0
    search: Callable[[Tensor], Tensor] | None = None
    rounded: Callable[[Tensor, Tensor], Tensor] | None = None
    call_size: int = 0
    followed: Tensor = field(init=False)
    stage: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.followed = torch.zeros(len(self.x), dtype=torch.bool, device=self.x.device)

    def gradient(self, x_adv: Tensor) -> Tensor:
        """Return the gradient of the summed loss at ``x_adv``; entries that are not finite become zero.

        The loss is summed, not averaged: a sample's gradient must not depend on who shares its batch. It is taken
        with respect to the input alone, so nothing reaches the weights or DDP's reducer.
        """
        return self.evaluate(x_adv, lambda logits: self.loss(logits, self.y)).grad

    def evaluate(self, x_adv: Tensor, loss: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> Evaluated:
        """Return logits, loss and input gradient at ``x_adv``, by the cheaper forward pass if there is one.

        Args:
            x_adv: Inputs in pixel units, one per entry of ``rows``.
            loss: Maps logits to the loss; if to several losses, shape (losses, batch), each gets its gradient.
            rows: Which rows of ``x`` these are, repeats allowed; None for all of them in order.
        """
        x_adv = x_adv.detach().requires_grad_()
        logits = self.search_logits(x_adv)
        value = loss(logits)
        if value.dim() == 2:
            grads = [self._input_gradient(line.sum(), x_adv, keep_graph=True) for line in value]
            grad = torch.stack(grads)
        else:
            grad = self._input_gradient(value.sum(), x_adv)
        # NaN where any entry is; no value comes back from the device
        peak = grad.abs().amax(tuple(range(value.dim(), grad.dim())))
        peak = peak.amax(0) if value.dim() == 2 else peak
        followed = torch.isfinite(peak) & (peak > 0)
        if rows is None:
            self.followed |= followed
        else:
            self.followed[rows[followed]] = True
        return Evaluated(logits.detach(), value.detach(), torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0))

    def _input_gradient(self, total: Tensor, x_adv: Tensor, *, keep_graph: bool = False) -> Tensor:
        if not total.requires_grad:
            raise UsageError(_NO_GRAPH)
        if self.loss_scale != 1.0:
            total = total * self.loss_scale
        try:
            (grad,) = torch.autograd.grad(total, x_adv, allow_unused=True, retain_graph=keep_graph)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise UsageError(
                "the model uses reentrant checkpointing, which cannot give input gradients alone: "
                "call torch.utils.checkpoint with use_reentrant=False"
            ) from error
        if grad is None:
            raise UsageError(_NO_GRAPH)
        return grad

    def project(self, x_adv: Tensor) -> Tensor:
        """Return ``x_adv`` projected onto the threat model."""
        return project(x_adv, self.x, self.eps, self.norm, self.bounds)

    def settle(self, x_adv: Tensor) -> Tensor:
        """Return ``x_adv`` with what lies outside the threat model projected, the rest bit for bit."""
        return settle(x_adv, self.x, self.eps, self.norm, self.bounds)

    def judge(self, x_adv: Tensor, batch_size: int | None) -> Tensor:
        """Return the logits of ``x_adv`` without a graph, at most ``batch_size`` rows at once where rows may part."""
        with torch.no_grad():
            if batch_size is None or len(x_adv) <= batch_size or not self.rowwise:
                return self.logits(x_adv)
            return torch.cat([self.logits(part) for part in torch.split(x_adv, batch_size)])

    def clip(self, x_adv: Tensor) -> Tensor:
        """Return ``x_adv`` clipped to the image box."""
        return x_adv if self.bounds is None else x_adv.clamp(self.bounds[0], self.bounds[1])

    def start(self, *tag: int | str) -> Tensor:
        """Return a random point of the threat model; ``tag`` tells one draw from another."""
        return random_start(self.x, self.eps, self.norm, self.bounds, self.noise, *tag)

    def ascent(self, grad: Tensor, x_adv: Tensor) -> Tensor:
        """Return the direction of steepest ascent at ``x_adv``; one step adds ``step_size`` times it."""
        return ascent_step(grad, x_adv, self.norm, self.bounds)

    def search_logits(self, x_adv: Tensor) -> Tensor:
        """Return logits by the cheaper forward pass if there is one."""
        return (self.search or self.logits)(x_adv)

    def reached(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return per row whether an attack has what it wants: another class than ``y``, or that one if targeted."""
        return (logits.argmax(1) == y) == self.targeted

    def confirmed(self, x_adv: Tensor, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Return for some rows of ``x_adv`` whether they have what the attack wants, by ``self.logits``.

        Asked are the points that will be handed out; ``x`` are the clean inputs of all rows.
        """
        part = rows if self.rowwise else torch.arange(len(x_adv), device=x_adv.device)
        points = x_adv[part]
        if self.rounded is not None:
            points = self.rounded(settle(points, x[part], self.eps, self.norm, self.bounds), x[part])
        with torch.no_grad():
            logits = self.logits(points)
        return self.reached(logits if self.rowwise else logits[rows], y[rows])

    def fooled(self, x_adv: Tensor, x: Tensor, logits: Tensor, y: Tensor, among: Tensor | None = None) -> Tensor:
        """Return per row whether ``x_adv`` fools the model, given its ``logits`` from ``search_logits``.

        What the cheaper forward pass takes for a success is put to ``self.logits``, whose word is final, and so are
        points that are yet to be rounded to half precision. Rows outside ``among`` are not asked for and count as
        failures; ``x`` are the clean inputs.
        """
        success = self.reached(logits, y)
        if among is not None:
            success = success & among
        if (self.search is not None or self.rounded is not None) and bool(success.any()):
            rows = success.nonzero()[:, 0]
            success = success.index_put((rows,), self.confirmed(x_adv, x, y, rows))
        return success

    def noise_of(self, rows: Tensor) -> Noise:
        """Return the noise of some rows, each with a stream of its own whether or not the rows have sample ids."""
        noise, places = self.noise, rows.tolist()
        if noise.sample_ids is None:
            ids = [derive_seed(noise.rank, noise.step, place) for place in places]
        else:
            ids = [noise.sample_ids[place] for place in places]
        return replace(noise, sample_ids=ids)

    def select(self, rows: Tensor) -> Problem:
        """Return the part of the problem with these rows, whose draws are those they have in the whole.

        Args:
            rows: Indices, shape (number of rows,).

        Raises:
            UsageError: If the forward pass reads the rest of the batch.
        """
        if not self.rowwise:
            raise UsageError("the forward pass reads the whole batch, so no rows can be left out: attack all of them")
        call_size = self.call_size or len(self.x)
        return replace(self, x=self.x[rows], y=self.y[rows], noise=self.noise_of(rows), call_size=call_size)
