"""Auto-PGD: gradient ascent with momentum whose step size halves where progress stops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from robustdist.attacks.base import Attack, Problem
from robustdist.attacks.functional import ascent_step, per_row, project
from robustdist.attacks.losses import LossName, checked_loss, targeted_dlr
from robustdist.attacks.queue import Engine, Items, Progress, run_queue
from robustdist.attacks.targets import other_classes
from robustdist.core.rows import taken
from robustdist.errors import UsageError
from robustdist.types import AttackLoss, Number, check_count

__all__ = ["APGD", "checkpoints", "sphere_start"]

APGDLoss: TypeAlias = LossName | Literal["dlr_targeted"]

_MOMENTUM = 0.75


class APGD(Attack):
    r"""Auto-PGD, projected gradient ascent that sets its own step size.

    From a random point on the sphere around ``x``, with :math:`\eta = 2 \epsilon` at first,

    .. math::
        z &= \Pi( x_k + \eta \, d(\nabla \ell(x_k)) ) \\
        x_{k+1} &= \Pi( x_k + 0.75 (z - x_k) + 0.25 (x_k - x_{k-1}) )

    where the first step is ``z`` itself and :math:`d` is the sign (linf) or the normalised gradient (l2). At the
    checkpoints :math:`w_j = \lceil p_j N \rceil` with
    :math:`p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + \max(p_j - p_{j-1} - 0.03, 0.06)` the step size is halved, and the
    search goes on from the best point, where fewer than ``rho`` of the steps since :math:`w_{j-1}` raised the loss, or
    where neither step size nor best loss changed since then. After the last step the loss is evaluated, so an image
    costs ``steps + 1`` forward passes.

    Without ``drop`` the result of an image is the worst of all iterates: a misclassified one before any other, then
    the one of largest loss. With it an image is finished at its first misclassified iterate, and which images are
    broken stays the same.

    Args:
        norm: "linf" or "l2".
        eps: Radius in pixel units.
        steps: Number of gradient steps :math:`N`.
        restarts: Number of runs per image and target from different starts.
        attack_loss: "ce", "dlr", "margin", a function of (logits, y), or "dlr_targeted": one run for each of the
            ``n_targets`` largest other logits of the clean image. With three classes or two, "dlr_targeted" becomes
            the difference of the two logits, and with two classes "dlr" becomes the margin.
        n_targets: Number of targets, at most the number of classes less one.
        rho: Share of the steps between two checkpoints that must raise the loss, in (0, 1).
        eot: Forward passes per step over which a random model is averaged; an iterate then counts as misclassified
            where more than half of them say so.
        drop: Whether an image leaves as soon as it is misclassified.
        batch_size: Largest number of (image, target, restart) in one forward pass; default the batch of the call.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Croce and Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free
        Attacks".

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 4))
        >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
        >>> x_adv = APGD(eps=0.1, steps=5, attack_loss="dlr_targeted")(model, x, y)
        >>> bool((x_adv - x).abs().max() <= 0.1 + 1e-6)
        True
    """

    def __init__(
        self,
        *,
        eps: Number = "8/255",
        steps: int = 100,
        restarts: int = 1,
        attack_loss: APGDLoss | AttackLoss = "ce",
        n_targets: int = 9,
        rho: float = 0.75,
        eot: int = 1,
        drop: bool = True,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        for option, value in {"steps": steps, "restarts": restarts, "n_targets": n_targets, "eot": eot}.items():
            check_count(value, option)
        if batch_size is not None:
            check_count(batch_size, "batch_size")
        if not 0 < rho < 1:
            raise UsageError(f"rho={rho} must be in (0, 1): it is the share of steps that must raise the loss")
        if kwargs.get("norm") == "l1":
            raise UsageError("norm='l1' needs steps of its own, which APGD does not have: use PGD, or norm='l2'")
        self.multi_target = attack_loss == "dlr_targeted"
        if self.multi_target and kwargs.get("targeted"):
            raise UsageError("attack_loss='dlr_targeted' chooses its targets itself: set targeted=False or use 'dlr'")
        super().__init__(
            eps=eps, step_size=0.0, attack_loss="dlr" if attack_loss == "dlr_targeted" else attack_loss, **kwargs
        )
        self.steps, self.restarts, self.n_targets = steps, restarts, n_targets
        self.rho, self.eot = rho, eot
        self.drop, self.batch_size = drop, batch_size

    def perturb(self, problem: Problem) -> Tensor:
        """Return the worst iterate of every image."""
        targets = None
        if self.multi_target or isinstance(self.attack_loss, str):
            logits = problem.judge(problem.x, self.batch_size)
            problem.loss(logits, problem.y)  # checks the targets
            if self.multi_target:
                targets = other_classes(logits, problem.y, self.n_targets)
        engine = _APGDEngine(self, problem, targets)
        return run_queue(problem, engine, batch_size=self.batch_size, drop=self.drop).x_adv

    def with_loss(self, attack_loss: APGDLoss | AttackLoss) -> Attack:
        """Return a copy of the attack that increases another loss."""
        changed = self.variant(multi_target=attack_loss == "dlr_targeted")
        changed.attack_loss = "dlr" if attack_loss == "dlr_targeted" else checked_loss(attack_loss)
        return changed

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values."""
        settings = super().settings()
        del settings["step_size"]
        if settings.pop("multi_target"):
            settings["attack_loss"] = "dlr_targeted"
        else:
            del settings["n_targets"]
        return settings


@dataclass
class _Runs(Items):
    """Runs of APGD; ``count`` is the number of steps taken and lives on the CPU."""

    target: Tensor
    count: Tensor
    x_adv: Tensor
    previous: Tensor
    best: Tensor
    best_grad: Tensor
    best_loss: Tensor
    loss: Tensor
    step_size: Tensor
    num_increases: Tensor
    checked_loss: Tensor
    was_halved: Tensor


class _APGDEngine(Engine[_Runs]):
    def __init__(self, attack: APGD, problem: Problem, targets: Tensor | None) -> None:
        self.attack, self.problem, self.targets = attack, problem, targets
        # with a loss of the user's nobody can say what a success is
        self.judges = isinstance(attack.attack_loss, str)
        self.num_groups = attack.restarts * (1 if targets is None else targets.shape[1])
        places = checkpoints(attack.steps)
        # per number of steps taken: the steps since the last checkpoint if this is one, else 0
        self.interval = torch.zeros(attack.steps + 1, dtype=torch.long)
        self.interval[places] = torch.tensor(places) - torch.tensor([0, *places[:-1]])

    def start(self, rows: Tensor, group: int) -> _Runs:
        problem = self.problem
        x, num = problem.x[rows], len(rows)
        target = rows if self.targets is None else self.targets[rows, group % self.targets.shape[1]]
        start = sphere_start(problem, rows, group)
        per_item = torch.zeros(num, dtype=x.dtype, device=x.device)
        return _Runs(
            image=rows,
            x=x,
            target=target,
            count=torch.zeros(num, dtype=torch.long),
            x_adv=start,
            previous=start,
            best=start,
            best_grad=torch.zeros_like(x),
            best_loss=per_item - math.inf,
            loss=per_item + math.inf,  # so that the first evaluation is no increase
            step_size=per_item + 2 * problem.eps,
            num_increases=per_item.clone(),
            checked_loss=per_item - math.inf,
            was_halved=torch.zeros(num, dtype=torch.bool, device=x.device),
        )

    def advance(self, items: _Runs) -> Progress:
        """Evaluate the current points, keep the best, adapt the steps at checkpoints, and step."""
        point, done = items.x_adv, items.count == self.attack.steps
        loss, grad, success = self._evaluate(items, with_gradient=not bool(done.all()))
        items.num_increases = items.num_increases + (loss > items.loss)
        better = loss > items.best_loss
        items.best = torch.where(per_row(better, point), point, items.best)
        items.best_grad = torch.where(per_row(better, point), grad, items.best_grad)
        items.best_loss = torch.where(better, loss, items.best_loss)
        items.loss = loss
        first = items.count == 0
        if bool(first.any()):
            items.checked_loss = torch.where(first.to(loss.device), loss, items.checked_loss)
        interval = self.interval[items.count]
        if bool((interval > 0).any()):
            grad = self._check(items, interval.to(loss.device), grad)
        if bool(done.any()):
            point, loss, success = self._conclude(items, done.to(loss.device), point, loss, success)
        self._step(items, grad, first.to(loss.device))
        items.count = items.count + 1
        return Progress(point, loss, success, done)

    def _evaluate(self, items: _Runs, *, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, gradient and success at the current points."""
        problem, rows = self.problem, items.image
        loss, grad = torch.zeros_like(items.loss), torch.zeros_like(items.x)
        votes = torch.zeros_like(items.loss)
        y = problem.y[rows] if self.judges else self._targets_of(rows)

        def loss_of(logits: Tensor) -> Tensor:
            if self.targets is not None:
                return targeted_dlr(logits, y, items.target)
            return problem.loss(logits, y)

        for _ in range(self.attack.eot):
            if with_gradient:
                logits, value, slope = problem.evaluate(items.x_adv, loss_of, rows)
                grad = grad + slope
            else:
                with torch.no_grad():
                    logits = problem.search_logits(items.x_adv)
                    value = loss_of(logits)
            if value.shape != loss.shape:
                raise UsageError(
                    "APGD compares samples, so attack_loss must return one value per sample (reduction='none')"
                )
            loss = loss + value.nan_to_num(nan=-math.inf) / self.attack.eot
            if self.judges:
                votes = votes + problem.fooled(items.x_adv, items.x, logits, y)
        return loss, grad, votes > self.attack.eot / 2

    def _targets_of(self, rows: Tensor) -> Any:
        """Return the targets of a loss of the user's, whatever they are, for these rows."""
        whole = not self.problem.rowwise or torch.equal(rows, torch.arange(len(self.problem.x), device=rows.device))
        return self.problem.y if whole else taken(self.problem.y, rows, len(self.problem.x))

    def _check(self, items: _Runs, interval: Tensor, grad: Tensor) -> Tensor:
        """Halve the step sizes of runs at a checkpoint that oscillate or stand still; return their new gradients."""
        here = interval > 0
        oscillates = items.num_increases < self.attack.rho * interval
        stands_still = ~items.was_halved & (items.best_loss == items.checked_loss)
        halve = here & (oscillates | stands_still)
        items.step_size = torch.where(halve, items.step_size / 2, items.step_size)
        items.x_adv = torch.where(per_row(halve, items.x), items.best, items.x_adv)
        items.loss = torch.where(halve, items.best_loss, items.loss)
        items.was_halved = torch.where(here, halve, items.was_halved)
        items.checked_loss = torch.where(here, items.best_loss, items.checked_loss)
        items.num_increases = items.num_increases.masked_fill(here, 0.0)
        return torch.where(per_row(halve, items.x), items.best_grad, grad)

    def _conclude(
        self, items: _Runs, done: Tensor, point: Tensor, loss: Tensor, success: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let runs that end without success hand over their best points."""
        failed = done & ~success
        point = torch.where(per_row(failed, point), items.best, point)
        loss = torch.where(failed, items.best_loss, loss)
        if self.judges and self.problem.search is not None and bool(failed.any()):
            # the cheaper forward may have overlooked that the best point already fools the model
            rows = failed.nonzero()[:, 0]
            confirmed = self.problem.confirmed(point, items.x, self.problem.y[items.image], rows)
            success = success.index_put((rows,), confirmed)
        return point, loss, success

    def _step(self, items: _Runs, grad: Tensor, first: Tensor) -> None:
        problem, at = self.problem, items.x_adv
        direction = ascent_step(grad, at, problem.norm, problem.bounds)
        z = self._project(at + per_row(items.step_size, at) * direction, items)
        mixed = self._project(at + _MOMENTUM * (z - at) + (1 - _MOMENTUM) * (at - items.previous), items)
        items.previous, items.x_adv = at, torch.where(per_row(first, at), z, mixed)

    def _project(self, x_adv: Tensor, items: _Runs) -> Tensor:
        return project(x_adv, items.x, self.problem.eps, self.problem.norm, self.problem.bounds)


def checkpoints(steps: int) -> list[int]:
    """Return the numbers of steps after which APGD looks back, in rising order.

    Example:
        >>> checkpoints(100)
        [22, 41, 57, 70, 80, 87, 93, 99]
    """
    length, shrink, shortest = (max(1, steps * percent // 100) for percent in (22, 3, 6))
    places = [length]
    while places[-1] < steps:
        length = max(length - shrink, shortest)
        places.append(places[-1] + length)
    return [place for place in places if place <= steps]


def sphere_start(problem: Problem, rows: Tensor, *tag: int | str, radius: float | None = None) -> Tensor:
    """Return points at distance ``radius``, by default ``eps``, in random directions, clipped to the image box."""
    x, noise = problem.x[rows], problem.noise_of(rows)
    if problem.norm == "linf":
        direction = noise.uniform(x, "start", *tag).mul_(2).sub_(1)
        length = direction.flatten(1).abs().amax(1)
    else:
        direction = noise.normal(x, "start", *tag)
        length = torch.linalg.vector_norm(direction.flatten(1), dim=1)
    moved = x + (problem.eps if radius is None else radius) * direction / per_row(length.clamp(min=1e-12), x)
    return project(moved, x, problem.eps, problem.norm, problem.bounds)
