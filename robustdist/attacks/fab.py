"""Fast adaptive boundary attack: walks along the decision boundary towards the clean image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robustdist.attacks.apgd import sphere_start
from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.functional import distance, per_row
from robustdist.attacks.hyperplane import dual_norm, shortest_step
from robustdist.attacks.losses import LossName, check_class_indices
from robustdist.attacks.problem import Evaluated
from robustdist.attacks.queue import Engine, Items, Progress, run_queue
from robustdist.attacks.targets import other_classes
from robustdist.errors import UsageError
from robustdist.types import AttackLoss, Number, check_count

__all__ = ["FAB"]


class FAB(Attack):
    r"""Looks for the nearest misclassified image by projections onto linearised decision boundaries.

    With :math:`f = z_t - z_y` the boundary to class ``t`` seen from :math:`x_k` is the hyperplane
    :math:`\pi = \{ z : f(x_k) + \langle \nabla f(x_k), z - x_k \rangle = 0 \}`. With :math:`\delta_1, \delta_2` the
    shortest steps onto it inside the image box from :math:`x_k` and from :math:`x`,

    .. math::
        \alpha &= \min( \|\delta_1\| / (\|\delta_1\| + \|\delta_2\|), \alpha_{max} ) \\
        x_{k+1} &= \mathrm{clip}( (1 - \alpha)(x_k + \eta \delta_1) + \alpha (x + \eta \delta_2) )

    A misclassified iterate is compared with the nearest one so far and then drawn back to
    :math:`x + \beta (x_{k+1} - x)`. An image is broken when a misclassified point lies within ``eps``; at the end the
    point at distance ``eps`` on the way to the nearest one is asked too.

    Args:
        norm: Norm of the ball, "linf", "l2" or "l1".
        eps: Radius in pixel units.
        steps: Number of projections.
        restarts: Number of runs; those after the first start at a random point at distance ``eps / 2``.
        n_targets: Number of target classes, largest logits of the clean image first; each is a run of its own. None
            aims at every step at the class with the nearest hyperplane, which takes one backward pass per class.
        alpha_max: Largest weight of the step from the clean image.
        eta: Overshoot of the projections.
        beta: Share of the way that is kept after a success.
        drop: Whether an image leaves as soon as it is broken.
        batch_size: Largest number of (image, target, restart) in one forward pass; default the batch of the call.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`; it has no attack loss and no targeted mode.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Croce and Hein, "Minimally Distorted Adversarial Examples with a Fast Adaptive Boundary Attack".
    """

    supports_targeted = False

    def __init__(
        self,
        *,
        eps: Number = "8/255",
        steps: int = 100,
        restarts: int = 1,
        n_targets: int | None = 9,
        alpha_max: float = 0.1,
        eta: float = 1.05,
        beta: float = 0.9,
        drop: bool = True,
        batch_size: int | None = None,
        attack_loss: LossName | AttackLoss = "margin",
        **kwargs: Any,
    ) -> None:
        check_count(steps, "steps")
        check_count(restarts, "restarts")
        for option, count in {"n_targets": n_targets, "batch_size": batch_size}.items():
            if count is not None:
                check_count(count, option)
        if not 0 <= alpha_max <= 1:
            raise UsageError(f"alpha_max={alpha_max} must be in [0, 1]: it is a weight")
        if not 1 <= eta < math.inf:
            raise UsageError(f"eta={eta} must be at least 1: smaller steps end before the boundary")
        if not 0 < beta <= 1:
            raise UsageError(f"beta={beta} must be in (0, 1]: it is the share of the way that is kept")
        if attack_loss != "margin":
            raise UsageError("FAB follows differences of logits: leave attack_loss out, or use APGD for other losses")
        super().__init__(eps=eps, step_size=0.0, attack_loss="margin", **kwargs)
        self.steps, self.restarts, self.n_targets = steps, restarts, n_targets
        self.alpha_max, self.eta, self.beta = alpha_max, eta, beta
        self.drop, self.batch_size = drop, batch_size

    def perturb(self, problem: Problem) -> Tensor:
        """Return a misclassified point within the ball where one was found, otherwise the nearest one."""
        logits = problem.judge(problem.x, self.batch_size)
        check_class_indices(logits, problem.y)
        targets = None if self.n_targets is None else other_classes(logits, problem.y, self.n_targets)
        engine = _FABEngine(self, problem, targets)
        return run_queue(problem, engine, batch_size=self.batch_size, drop=self.drop).x_adv

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Refuse: FAB follows differences of logits."""
        raise UsageError(f"FAB follows differences of logits, so attack_loss={attack_loss!r} cannot be used: remove it")

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values."""
        settings = super().settings()
        for name in ("step_size", "attack_loss"):
            del settings[name]
        return settings


@dataclass
class _Walks(Items):
    """Walks along the boundary; ``count`` is the number of projections made and lives on the CPU."""

    y: Tensor
    target: Tensor
    x_adv: Tensor
    nearest: Tensor
    distance: Tensor
    count: Tensor


class _FABEngine(Engine[_Walks]):
    def __init__(self, attack: FAB, problem: Problem, targets: Tensor | None) -> None:
        self.attack, self.problem, self.targets = attack, problem, targets
        self.num_targets = 1 if targets is None else targets.shape[1]
        self.num_groups = attack.restarts * self.num_targets
        self._share_drawn_back = 0.0

    def start(self, rows: Tensor, group: int) -> _Walks:
        problem, restart = self.problem, group // self.num_targets
        x = problem.x[rows]
        return _Walks(
            image=rows,
            x=x,
            y=problem.y[rows],
            target=rows if self.targets is None else self.targets[rows, group % self.num_targets],
            x_adv=sphere_start(problem, rows, group, radius=problem.eps / 2) if restart else x,
            nearest=x,
            distance=torch.full((len(rows),), math.inf, dtype=x.dtype, device=x.device),
            count=torch.zeros(len(rows), dtype=torch.long),
        )

    def advance(self, items: _Walks) -> Progress:
        """Judge the current points, draw the misclassified ones back, and project."""
        problem, point, done = self.problem, items.x_adv, items.count == self.attack.steps
        ends = done.to(point.device)
        # a point that is drawn back needs its gradient elsewhere: where most are, judging comes first and alone
        ahead = not bool(done.all()) and self._share_drawn_back <= 0.5 and problem.rowwise
        if ahead:
            logits, value, slope = self._linearise(items)
        else:
            with torch.no_grad():
                logits = problem.search_logits(point)
        wrong = problem.reached(logits, items.y)
        success = self._keep(items, logits, wrong)
        nearest, length = items.nearest, items.distance
        if bool(done.any()):
            success = self._conclude(items, ends & ~success, success)
        progress = Progress(torch.where(per_row(success, point), items.x_adv, nearest), -length, success, done)
        if not bool(done.all()):
            back = wrong & ~ends
            self._share_drawn_back = float(back.float().mean())
            items.x_adv = torch.where(per_row(back, point), items.x + self.attack.beta * (point - items.x), point)
            if not ahead:
                _, value, slope = self._linearise(items)
            elif bool(back.any()):
                rows = back.nonzero()[:, 0]
                _, value[rows], slope[rows] = self._linearise(items.take(rows))
            self._project(items, value, slope)
        items.count = items.count + 1
        return progress

    def _linearise(self, items: _Walks) -> Evaluated:
        """Return logits, ``z_t - z_y`` and its gradient at the current points."""
        if self.targets is not None:
            pair = torch.stack([items.y.long(), items.target], 1)
            return self.problem.evaluate(
                items.x_adv, lambda logits: logits.gather(1, pair).diff(dim=1)[:, 0], items.image
            )
        logits, values, slopes = self.problem.evaluate(
            items.x_adv, lambda logits: (logits - logits.gather(1, items.y.long()[:, None])).T, items.image
        )
        lengths = torch.stack([dual_norm(slope, self.problem.norm) for slope in slopes])
        far = values.abs() / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
        own = torch.arange(len(values), device=values.device)[:, None] == items.y
        closest = far.masked_fill(own, math.inf).argmin(0)
        places = torch.arange(len(closest), device=values.device)
        return Evaluated(logits, values[closest, places], slopes[closest, places])

    def _keep(self, items: _Walks, logits: Tensor, wrong: Tensor) -> Tensor:
        """Remember the nearest misclassified points; return which lie within the ball."""
        away = distance(items.x_adv, items.x, self.problem.norm)
        nearer = wrong & (away < items.distance)
        items.nearest = torch.where(per_row(nearer, items.x), items.x_adv, items.nearest)
        items.distance = torch.where(nearer, away, items.distance)
        return self.problem.fooled(items.x_adv, items.x, logits, items.y, away <= self.problem.eps)

    def _conclude(self, items: _Walks, ending: Tensor, success: Tensor) -> Tensor:
        """Ask the points at distance ``eps`` on the ways to the nearest ones; return all successes."""
        rows = (ending & torch.isfinite(items.distance)).nonzero()[:, 0]
        if len(rows):
            x = items.x[rows]
            share = (self.problem.eps / items.distance[rows]).clamp(max=1)
            items.x_adv = items.x_adv.index_put((rows,), x + per_row(share, x) * (items.nearest[rows] - x))
            success = success.index_put((rows,), self.problem.confirmed(items.x_adv, items.x, items.y, rows))
        return success

    def _project(self, items: _Walks, value: Tensor, slope: Tensor) -> None:
        """Step onto the linearised boundary, a little from the clean image's side."""
        attack, norm, bounds = self.attack, self.problem.norm, self.problem.bounds
        x, at = items.x, items.x_adv
        towards = shortest_step(at, slope, -value, norm, bounds)
        across = (slope * (at - x)).flatten(1).sum(1)
        from_clean = shortest_step(x, slope, across - value, norm, bounds)
        first, second = distance(towards, torch.zeros_like(x), norm), distance(from_clean, torch.zeros_like(x), norm)
        share = (first / (first + second).clamp(min=1e-12)).clamp(max=attack.alpha_max)
        alpha = per_row(share, x)
        moved = (1 - alpha) * (at + attack.eta * towards) + alpha * (x + attack.eta * from_clean)
        items.x_adv = self.problem.clip(moved)
