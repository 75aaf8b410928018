"""Balls, projections and steps on plain tensors.

All functions take ``x`` of shape (batch, ...), treat each row as one sample and return new tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robustdist.core.rng import Noise
from robustdist.types import Bounds, Norm

__all__ = ["ascent_step", "distance", "per_row", "project", "project_l1_ball", "random_start", "settle"]

# Share of the coordinates that one l1 step moves: enough that a step is not wasted on pixels pressed against the box.
_L1_STEP_SHARE = 0.05
# How far beyond the radius, relative to it, float32 may put a point that was projected onto the ball.
_ROUNDING = 1e-6


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` of shape (batch,) in a shape that broadcasts over the rows of ``like``."""
    return values.view(-1, *[1] * (like.dim() - 1))


def distance(x_adv: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Return the distance of every row of ``x_adv`` to its row of ``x``, shape (batch,)."""
    order = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}[norm]
    lengths: Tensor = torch.linalg.vector_norm((x_adv - x).flatten(1), ord=order, dim=1)
    return lengths


def project_l1_ball(delta: Tensor, eps: float) -> Tensor:
    """Return the Euclidean projection of each row of ``delta`` onto the l1 ball of radius ``eps``.

    References:
        Duchi et al., "Efficient Projections onto the l1-Ball for Learning in High Dimensions".
    """
    flat = delta.flatten(1)
    magnitudes = flat.abs()
    ordered = magnitudes.sort(dim=1, descending=True).values
    excess = ordered.cumsum(1) - eps
    ranks = torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=flat.dtype)
    num_kept = (ordered * ranks > excess).sum(1, keepdim=True).clamp_(min=1)
    threshold = (excess.gather(1, num_kept - 1) / num_kept).clamp_(min=0)
    projected = flat.sign() * (magnitudes - threshold).clamp_(min=0)
    inside = magnitudes.sum(1, keepdim=True) <= eps
    return torch.where(inside, flat, projected).view_as(delta)


def project(x_adv: Tensor, x: Tensor, eps: float, norm: Norm, bounds: Bounds) -> Tensor:
    r"""Project ``x_adv`` onto the ball of radius ``eps`` around ``x``, then onto the image box.

    Clipping to a box that contains ``x`` only shortens the perturbation, so both constraints hold afterwards.
    """
    delta = x_adv - x
    if norm == "linf":
        delta.clamp_(-eps, eps)
    elif norm == "l2":
        norms = torch.linalg.vector_norm(delta.flatten(1), dim=1)
        delta = delta * per_row((eps / norms.clamp(min=1e-12)).clamp(max=1.0), delta)
    else:
        delta = project_l1_ball(delta, eps)
    projected = delta.add_(x)
    return projected if bounds is None else projected.clamp_(bounds[0], bounds[1])


def settle(x_adv: Tensor, x: Tensor, eps: float, norm: Norm, bounds: Bounds) -> Tensor:
    """Project what is outside, and leave what is inside as it is, bit for bit.

    A second projection moves points by a rounding error, and what was judged before it is then another point. For l2
    and l1 a row that exceeds the radius by no more than rounding counts as inside.
    """
    projected = project(x_adv, x, eps, norm, bounds)
    if norm == "linf":
        inside = (x_adv - x).abs() <= eps
    else:
        inside = per_row(distance(x_adv, x, norm) <= eps * (1 + _ROUNDING), x)
    if bounds is not None:
        boxed = (x_adv >= bounds[0]) & (x_adv <= bounds[1])
        inside = inside & (boxed if norm == "linf" else per_row(boxed.flatten(1).all(1), x))
    return torch.where(inside, x_adv, projected)


def random_start(x: Tensor, eps: float, norm: Norm, bounds: Bounds, noise: Noise, *tag: int | str) -> Tensor:
    """Draw a start from the ball around ``x``: uniform in the linf and l2 ball, a random direction for l1."""
    if norm == "linf":
        delta = noise.uniform(x, "start", *tag).mul_(2 * eps).sub_(eps)
    else:
        direction = noise.normal(x, "start", *tag)
        order = 2.0 if norm == "l2" else 1.0
        norms = torch.linalg.vector_norm(direction.flatten(1), ord=order, dim=1).clamp(min=1e-12)
        radius = noise.uniform(x[:, :1].flatten(1)[:, 0], "radius", *tag)
        if norm == "l2":
            # the volume of a ball grows with radius ** dimension
            radius = radius ** (1.0 / max(1, x[0].numel()))
        delta = direction * per_row(eps * radius / norms, x)
    return project(x + delta, x, eps, norm, bounds)


def ascent_step(grad: Tensor, x_adv: Tensor, norm: Norm, bounds: Bounds) -> Tensor:
    """Return the direction of steepest ascent, of unit length in ``norm``.

    linf: the sign. l2: the normalised gradient. l1: equal steps on the 5 % of coordinates with the largest gradient,
    not counting those already pressed against the image box.

    References:
        Tramèr and Boneh, "Adversarial Training and Robustness for Multiple Perturbations" (the l1 step).
    """
    if norm == "linf":
        return grad.sign()
    flat = grad.flatten(1)
    if norm == "l2":
        # divided by the largest entry first: squares of 1e-23, as confident models give, would be 0 in float32
        scaled = grad / per_row(flat.abs().amax(1).clamp(min=torch.finfo(flat.dtype).tiny), grad)
        return scaled / per_row(torch.linalg.vector_norm(scaled.flatten(1), dim=1).clamp(min=1e-12), grad)
    if bounds is not None:
        at = x_adv.flatten(1)
        blocked = ((at <= bounds[0]) & (flat < 0)) | ((at >= bounds[1]) & (flat > 0))
        flat = flat.masked_fill(blocked, 0.0)
    num_moved = max(1, round(_L1_STEP_SHARE * flat.shape[1]))
    threshold = flat.abs().topk(num_moved, dim=1).values[:, -1:]
    signs = flat.sign() * (flat.abs() >= threshold)
    return (signs / signs.abs().sum(1, keepdim=True).clamp(min=1.0)).view_as(grad)
