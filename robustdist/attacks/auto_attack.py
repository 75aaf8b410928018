"""AutoAttack: several attacks one after the other, each on what the earlier ones left standing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from robustdist.attacks.apgd import APGD
from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.attacks.fab import FAB
from robustdist.attacks.losses import LOSSES, LossName, check_class_indices
from robustdist.attacks.square import Square
from robustdist.attacks.token_pgd import TokenPGD
from robustdist.attacks.torch_attack import TorchAttack
from robustdist.core.fast_path import FastPath
from robustdist.core.forward import AttackPrecision, precision_context
from robustdist.core.guard import frozen_parameters
from robustdist.core.rng import Noise, derive_seed
from robustdist.core.stand_ins import StandIns, stand_ins
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.types import AttackLoss, Number, check_count

__all__ = ["AutoAttack"]

_VERSIONS = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}
_PLUS_RESTARTS = 5
_RAND_EOT = 20
# Images on which a fold of batch norms is checked.
_NUM_CHECKED = 16


class AutoAttack(Attack):
    """The ensemble by which robust accuracies are compared; its verdict is the worst case over its stages.

    Images that the model gets wrong are left as they are. Every stage sees the images that all stages before it failed
    to break, and within a stage an image leaves as soon as it is broken.

    - "standard": APGD on cross-entropy, APGD on the targeted difference of logits ratio for nine targets, FAB for
      nine targets, Square.
    - "plus": APGD on cross-entropy and on the difference of logits ratio and untargeted FAB, five restarts each; then
      Square and the targeted stages of "standard".
    - "rand": APGD on cross-entropy and on the difference of logits ratio, each gradient the mean of 20 forward passes.
      It makes no claim that a second run finds the same.
    - "custom": the stages given as ``attacks``.

    With fewer than ten classes there are as many targets as other classes; the losses adapt as
    :class:`~robustdist.attacks.apgd.APGD` says.

    Args:
        norm: Norm of the ball, "linf" or "l2".
        eps: Radius in pixel units.
        version: "standard", "plus", "rand" or "custom".
        attacks: Stages of "custom": names ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square") or attacks with
            the same ``norm``, ``eps`` and ``bounds``.
        steps: Gradient steps of APGD and projections of FAB.
        queries: Forward passes of Square.
        precision: "32", or "bf16" to search with forward passes in bfloat16; iterates and projections stay in float32
            and every success is confirmed by the model's own forward pass without autocast.
        channels_last: Search in channels-last order, which many convolutions prefer; confirmed likewise.
        fold_batch_norm: Search with batch norms folded into convolutions where a check on the first images of the call
            allows it, see :class:`~robustdist.core.fast_path.FastPath`; confirmed likewise.
        drop: Whether an image leaves a stage as soon as it is broken.
        batch_size: Largest number of (image, target, restart) in one forward pass, those that judge and those of stages
            without such an option included; default the batch of the call.
        **kwargs: As in :class:`~robustdist.attacks.base.Attack`; losses are fixed, there is no targeted mode.

    Raises:
        UsageError: If an argument is out of range or does not fit the version.

    References:
        Croce and Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free
        Attacks".

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
        >>> result = AutoAttack(eps=0.1, steps=5, queries=10).run(model, x, y)
        >>> result.x_adv.shape, result.stage.shape
        (torch.Size([2, 1, 2, 2]), torch.Size([2]))
    """

    supports_targeted = False

    def __init__(
        self,
        *,
        eps: Number = "8/255",
        version: Literal["standard", "plus", "rand", "custom"] = "standard",
        attacks: list[str | Attack] | None = None,
        steps: int = 100,
        queries: int = 5000,
        precision: Literal["32", "bf16"] = "32",
        channels_last: bool = False,
        fold_batch_norm: bool = False,
        drop: bool = True,
        batch_size: int | None = None,
        attack_loss: LossName | AttackLoss = "margin",
        **kwargs: Any,
    ) -> None:
        if version not in ("standard", "plus", "rand", "custom"):
            raise UsageError(f"version={version!r} is unknown: choose standard, plus, rand or custom")
        if (attacks is None) == (version == "custom"):
            raise UsageError(
                "attacks belongs to version='custom' and has to be given there: a list of names or attacks"
            )
        if precision not in ("32", "bf16"):
            raise UsageError(f"precision={precision!r} is unknown: choose 32 or bf16")
        if attack_loss != "margin":
            raise UsageError("AutoAttack has losses of its own: leave attack_loss out, or use version='custom'")
        if kwargs.get("model_mode", "eval") != "eval":
            raise UsageError("AutoAttack judges the model that will be used: leave model_mode at 'eval'")
        for option, count in {"steps": steps, "queries": queries, "batch_size": batch_size}.items():
            if count is not None:
                check_count(count, option)
        super().__init__(eps=eps, step_size=0.0, attack_loss="margin", **kwargs)
        self.version, self.precision = version, precision
        self.channels_last, self.fold_batch_norm = channels_last, fold_batch_norm
        self._copies: StandIns = {}
        self.steps, self.queries, self.drop, self.batch_size = steps, queries, drop, batch_size
        chosen = list(attacks or []) if version == "custom" else list(_VERSIONS[version])
        if not chosen:
            raise UsageError("attacks is empty: give at least one, for example ['apgd-ce', 'apgd-t']")
        self.attacks = [self._stage(entry) for entry in chosen]
        self.stages = _names(chosen)

    def run(self, model: nn.Module, x: Tensor, y: Any, **kwargs: Any) -> AttackResult:
        """Attack one batch; arguments as in :meth:`Attack.run`."""
        # foreign code may call backward(); nothing of it may reach the weights
        foreign = any(isinstance(attack, TorchAttack) for attack in self.attacks)
        with frozen_parameters(model) if foreign and isinstance(model, nn.Module) else nullcontext():
            return super(AutoAttack, self._equipped(model, x, **kwargs)).run(model, x, y, **kwargs)

    def _equipped(
        self,
        model: nn.Module,
        x: Tensor,
        *,
        forward: Callable[[Tensor], Any] | None = None,
        rowwise: bool = True,
        **_: Any,
    ) -> AutoAttack:
        """Return this attack with copies of the weights as the cheap search wants them."""
        wanted = self.channels_last or self.fold_batch_norm
        if not (wanted and isinstance(model, nn.Module) and x.is_floating_point() and len(x)):
            return self
        fast_path = FastPath(_precision_for(x, self.precision), self.channels_last, self.fold_batch_norm)
        if self.fold_batch_norm:
            fast_path.prepare(model, x[:_NUM_CHECKED] if rowwise else x, forward=forward)
            for note in fast_path.notes:
                warnings.warn(note, RobustDistWarning, stacklevel=3)
        equipped = copy.copy(self)
        equipped._copies = fast_path.stand_ins(model)
        return equipped

    def problem(
        self,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Any,
        noise: Noise,
        *,
        rowwise: bool = True,
        **scales: float,
    ) -> Problem:
        """Return one attack call that judges without autocast; arguments as in :meth:`Attack.problem`."""
        problem = super().problem(forward, x, y, noise, rowwise=rowwise, **scales)
        logits = problem.logits

        def plain(x: Tensor) -> Tensor:
            with precision_context("32", x.device):
                return logits(x)

        precision = _precision_for(x, self.precision)

        def cheap(x: Tensor) -> Tensor:
            if self.channels_last and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with precision_context(precision, x.device), stand_ins(self._copies):
                return logits(x)

        problem.logits = plain
        if self.channels_last or self.fold_batch_norm or precision == "bf16":
            problem.search = cheap
        return problem

    def perturb(self, problem: Problem) -> Tensor:
        """Return per image the point that broke it, or the one of smallest margin among the stages' results."""
        logits = problem.judge(problem.x, self.batch_size)
        check_class_indices(logits, problem.y)
        x_adv, margin = problem.x.clone(), LOSSES["margin"](logits, problem.y)
        standing = ~problem.reached(logits, problem.y)
        problem.stage = torch.full_like(problem.y, -1, dtype=torch.long)
        # images that are wrong from the start need no gradient
        problem.followed |= ~standing
        for place, attack in enumerate(self.attacks):
            rows = standing.nonzero()[:, 0]
            if len(rows) == 0:
                break
            if not problem.rowwise:
                rows = torch.arange(len(standing), device=standing.device)
            found, found_margin, broken = self._run_stage(problem, place, attack, rows)
            worse = standing[rows] & (broken | (found_margin > margin[rows]))
            x_adv[rows[worse]], margin[rows[worse]] = found[worse], found_margin[worse]
            problem.stage[rows[standing[rows] & broken]] = place
            standing[rows] &= ~broken
        return x_adv

    def _run_stage(self, problem: Problem, place: int, attack: Attack, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what one stage found for ``rows``, its margins, and which of them are broken."""
        if self.batch_size is not None and problem.rowwise and getattr(attack, "batch_size", None) is None:
            parts = [self._run_part(problem, place, attack, part) for part in torch.split(rows, self.batch_size)]
            x_adv, margin, broken = (torch.cat(found) for found in zip(*parts, strict=True))
            return x_adv, margin, broken
        return self._run_part(problem, place, attack, rows)

    def _run_part(self, problem: Problem, place: int, attack: Attack, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = problem if not problem.rowwise else problem.select(rows)
        noise = replace(whole.noise, seed=derive_seed(attack.seed, "stage", place))
        part = attack.adapt(whole, noise)
        # a success is one at exactly this point
        x_adv = whole.settle(attack.perturb(part).detach())
        if whole.rounded is not None:
            x_adv = whole.rounded(x_adv, whole.x)
        if attack.uses_gradient:
            problem.followed[rows] |= part.followed
        logits = problem.judge(x_adv, self.batch_size)
        return x_adv, LOSSES["margin"](logits, part.y), problem.reached(logits, part.y)

    def _finish(self, x_adv: Tensor, problem: Problem) -> Tensor:
        return x_adv  # judged where they are

    def with_loss(self, attack_loss: LossName | AttackLoss) -> Attack:
        """Refuse: the stages have losses of their own."""
        raise UsageError(
            f"AutoAttack has losses of its own, so attack_loss={attack_loss!r} cannot be used: remove it, or use PGD"
        )

    def settings(self) -> dict[str, Any]:
        """Return the attack's arguments as plain values, those of the stages included."""
        settings = super().settings()
        for name in ("step_size", "attack_loss", "targeted", "model_mode"):
            del settings[name]
        settings["attacks"] = [attack.settings() for attack in self.attacks]
        return settings

    def _stage(self, entry: str | Attack) -> Attack:
        if isinstance(entry, Attack):
            mine, theirs = (self.norm, self.radius, self.bounds), (entry.norm, entry.radius, entry.bounds)
            if mine != theirs:
                raise UsageError(
                    f"attacks holds {type(entry).__name__} with (norm, eps, bounds)={theirs}, AutoAttack has {mine}: "
                    "a worst case is about one threat model, give both the same"
                )
            if isinstance(entry, (AutoAttack, TokenPGD)):
                raise UsageError(f"attacks holds {type(entry).__name__}, which cannot be a stage: leave it out")
            if entry.targeted:
                raise UsageError(f"attacks holds a targeted {type(entry).__name__}: set targeted=False")
            return entry
        if entry not in _STAGES:
            raise UsageError(f"attacks holds {entry!r}: choose among {', '.join(_STAGES)}, or give an attack")
        common = {
            "norm": self.norm,
            "eps": self.eps,
            "bounds": self.bounds,
            "seed": self.seed,
            "drop": self.drop,
            "batch_size": self.batch_size,
        }
        return _STAGES[entry](self, common)


def _apgd(loss: Literal["ce", "dlr"]) -> Callable[[AutoAttack, dict[str, Any]], Attack]:
    def make(whole: AutoAttack, common: dict[str, Any]) -> Attack:
        restarts = _PLUS_RESTARTS if whole.version == "plus" else 1
        eot = _RAND_EOT if whole.version == "rand" else 1
        return APGD(attack_loss=loss, steps=whole.steps, restarts=restarts, eot=eot, **common)

    return make


_STAGES: dict[str, Callable[[AutoAttack, dict[str, Any]], Attack]] = {
    "apgd-ce": _apgd("ce"),
    "apgd-dlr": _apgd("dlr"),
    "apgd-t": lambda whole, common: APGD(attack_loss="dlr_targeted", steps=whole.steps, **common),
    "fab": lambda whole, common: FAB(
        n_targets=None, steps=whole.steps, restarts=_PLUS_RESTARTS if whole.version == "plus" else 1, **common
    ),
    "fab-t": lambda whole, common: FAB(steps=whole.steps, **common),
    "square": lambda whole, common: Square(queries=whole.queries, rescale=False, look_ahead=True, **common),
}


def _precision_for(x: Tensor, precision: Literal["32", "bf16"]) -> AttackPrecision:
    """A model in half precision is cheap already, and autocast would mix its types."""
    return "32" if x.itemsize == 2 else precision


def _names(entries: Sequence[str | Attack]) -> list[str]:
    """Return one name per stage, numbered where they repeat."""
    names: list[str] = []
    for entry in entries:
        name = entry if isinstance(entry, str) else type(entry).__name__.lower()
        number = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(name if number == 0 else f"{name}#{number + 1}")
    return names
