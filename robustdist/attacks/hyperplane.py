"""The shortest way onto a hyperplane inside the image box."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robustdist.types import Bounds, Norm

__all__ = ["dual_norm", "shortest_step"]

# The iteration ends by itself when no further pixel meets the box; it rarely needs ten rounds.
_MAX_ROUNDS = 50


def dual_norm(w: Tensor, norm: Norm) -> Tensor:
    """Return per row the norm of ``w`` dual to ``norm``, shape (batch,)."""
    order = {"linf": 1.0, "l2": 2.0, "l1": math.inf}[norm]
    lengths: Tensor = torch.linalg.vector_norm(w.flatten(1), ord=order, dim=1)
    return lengths


def shortest_step(x: Tensor, w: Tensor, gap: Tensor, norm: Norm, bounds: Bounds) -> Tensor:
    r"""Return the shortest step from ``x`` onto a hyperplane within the box.

    .. math:: \arg\min_\delta \|\delta\| \; \text{s.t.} \; \langle w, \delta \rangle = g, \; lo \le x + \delta \le hi

    All its entries go along :math:`\mathrm{sign}(g) w`. In linf they have one length, in l2 lengths proportional to
    :math:`|w|`, both cut at the box; the common factor solves a piecewise linear equation. In l1 the entries with the
    largest :math:`|w|` go to the box one after another. Where the box does not reach the hyperplane, the result is the
    corner nearest to it.

    Args:
        x: Points in the box, shape (batch, ...).
        w: Normals, shape of ``x``.
        gap: The value :math:`g` that the step has to make up, shape (batch,).
        norm: Norm to minimise.
        bounds: The box, or None.
    """
    flat, slope = x.flatten(1), w.flatten(1) * gap.sign()[:, None]
    if bounds is None:
        room = torch.full_like(flat, math.inf)
    else:
        room = torch.where(slope > 0, bounds[1] - flat, flat - bounds[0]).clamp_(min=0)
    # an entry that does not move the value stays where it is
    room = torch.where(slope == 0, 0.0, room)
    weight, size = slope.abs(), gap.abs()[:, None]
    if norm == "l1":
        step = _greedy(weight, room, size)
    else:
        step = _proportional(weight, weight if norm == "l2" else None, room, size)
    return (step * slope.sign()).view_as(x)


def _proportional(weight: Tensor, profile: Tensor | None, room: Tensor, gap: Tensor) -> Tensor:
    """Return ``min(t * profile, room)`` with the smallest ``t`` at which it is worth ``gap``; None: profile 1.

    The value is concave in ``t``, so Newton's method started at the left end rises to the solution and reaches it
    exactly once it has passed all entries that meet the box.
    """
    tiny = torch.finfo(weight.dtype).tiny
    gain = weight if profile is None else weight * profile
    most = weight * room
    t = gap / gain.sum(1, keepdim=True).clamp(min=tiny)
    for _ in range(_MAX_ROUNDS):
        met = _along(t, profile) >= room
        # where, not masked_fill, which is not vectorised on the CPU; not a product, as room may be infinite
        rest = gap - torch.where(met, most, 0.0).sum(1, keepdim=True)
        further = torch.maximum(t, rest / torch.where(met, 0.0, gain).sum(1, keepdim=True).clamp(min=tiny))
        if torch.equal(further, t):
            break
        t = further
    return torch.minimum(_along(t, profile), room)


def _along(t: Tensor, profile: Tensor | None) -> Tensor:
    """Return ``t * profile``, 0 for an entry that does not move also where ``t`` has overflowed."""
    return t if profile is None else torch.where(profile > 0, t * profile, 0.0)


def _greedy(weight: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """Return entries at ``room`` in falling order of ``weight`` until they are worth ``gap``, the last one in part."""
    ordered, order = weight.sort(dim=1, descending=True)
    most = room.gather(1, order)
    # shifted, not subtracted: without a box the first entry is worth infinitely much
    before = torch.nn.functional.pad((ordered * most).cumsum(1)[:, :-1], (1, 0))
    wanted = (gap - before).clamp(min=0) / ordered.clamp(min=torch.finfo(weight.dtype).tiny)
    return torch.zeros_like(weight).scatter(1, order, torch.minimum(wanted, most))
