"""The rows of ``robustdist bench attack``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, Attack
from robustdist.bench.models import PreActResNet, ResNet
from robustdist.objectives import (
    AWP,
    DAT,
    FGSMRS,
    MART,
    NFGSM,
    PGDAT,
    TRADES,
    FastBAT,
    FreeAT,
    FriendlyAT,
    GradAlign,
    Objective,
)

__all__ = ["EPS", "REFERENCE", "STEP_SIZE", "UNIT", "AttackFunction", "Spec", "attack_specs"]

EPS = 8 / 255
STEP_SIZE = 2 / 255
#: Key of the row that ratios are to, and of its counterpart for the other network.
UNIT = "standard"
_POST_UNIT = "resnet_standard"
#: Key of the row of torchattacks.
REFERENCE = "torchattacks_pgd"

#: ``attack(model, x, y)``; None for a training step on clean images.
AttackFunction = Callable[[nn.Module, Tensor, Tensor], Tensor] | None


@dataclass(frozen=True)
class Spec:
    """One row of the table; ``note`` says why it cannot be run.

    A row makes an adversarial batch, through ``fast_path`` if given, and trains on it, or minimises ``objective`` with
    the attack of ``inner``. Its ratios are to the row ``unit``, which trains the same network.
    """

    key: str
    name: str
    make_attack: Callable[[nn.Module], AttackFunction]
    objective: Callable[[], Objective] | None = None
    inner: Attack | None = None
    channels_last: bool = False
    bf16_attack: bool = False
    fast_path: dict[str, Any] | None = None
    make_model: type[PreActResNet | ResNet] = PreActResNet
    note: str | None = None

    @property
    def unit(self) -> str:
        """Key of the row that this one's ratios are to."""
        return UNIT if self.make_model is PreActResNet else _POST_UNIT


def attack_specs(steps: int) -> list[Spec]:
    """Return all rows; PGD takes ``steps`` steps."""
    pgd = PGD(eps=EPS, steps=steps, step_size=STEP_SIZE)
    fgsm = FGSM(eps=EPS, step_size=1.25 * EPS, random_start=True)
    note = _torchattacks_missing()

    def theirs(model: nn.Module) -> AttackFunction:
        import torchattacks

        attack = torchattacks.PGD(model, eps=EPS, alpha=STEP_SIZE, steps=steps)
        return lambda _, x, y: attack(x, y)

    return [
        Spec(UNIT, "standard step", lambda _: None),
        Spec("standard_channels_last", "standard step, channels_last", lambda _: None, channels_last=True),
        Spec("pgd", f"PGD-{steps}", lambda _: pgd),
        Spec("pgd_channels_last", f"PGD-{steps}, channels_last", lambda _: pgd, channels_last=True),
        Spec("pgd_bf16", f"PGD-{steps}, bf16 attack", lambda _: pgd, bf16_attack=True),
        Spec(
            "pgd_channels_last_bf16",
            f"PGD-{steps}, channels_last, bf16 attack",
            lambda _: pgd,
            channels_last=True,
            bf16_attack=True,
        ),
        *_fast_specs(pgd),
        Spec("fgsm", "FGSM with random start", lambda _: fgsm),
        *(
            Spec(key, name, lambda _: None, objective=objective, inner=inner)
            for key, name, objective, inner in _objectives(pgd)
        ),
        Spec(REFERENCE, f"torchattacks.PGD, {steps} steps", theirs, note=note),
        Spec(
            "torchattacks_pgd_bf16", f"torchattacks.PGD, {steps} steps, autocast", theirs, bf16_attack=True, note=note
        ),
    ]


def _fast_specs(pgd: PGD) -> list[Spec]:
    """Return the rows of fast paths, and all rows of the network whose batch norms fold without exception."""
    name, bf16 = f"PGD-{pgd.steps}", {"precision": "bf16"}

    def attack(_: nn.Module) -> AttackFunction:
        return pgd

    def rows(prefix: str, title: str, **options: Any) -> list[Spec]:
        fold = {"fold_batch_norm": True}
        return [
            Spec(f"{prefix}pgd_folded", f"{title}{name}, folded", attack, fast_path=fold, **options),
            Spec(
                f"{prefix}pgd_channels_last_folded",
                f"{title}{name}, channels_last, folded",
                attack,
                channels_last=True,
                fast_path=fold,
                **options,
            ),
            Spec(
                f"{prefix}pgd_fast",
                f"{title}{name}, channels_last, folded, bf16 attack",
                attack,
                channels_last=True,
                fast_path=fold | bf16,
                **options,
            ),
        ]

    return [
        *rows("", ""),
        Spec(_POST_UNIT, "ResNet: standard step", lambda _: None, make_model=ResNet),
        Spec("resnet_pgd", f"ResNet: {name}", attack, make_model=ResNet),
        *rows("resnet_", "ResNet: ", make_model=ResNet),
    ]


def _objectives(pgd: PGD) -> list[tuple[str, str, Callable[[], Objective], Attack]]:
    """Return key, name, objective and inner attack of the rows of objectives; weights change nothing in the cost."""
    steps = pgd.steps
    pgd2 = PGD(eps=EPS, steps=2, step_size=EPS / 2)
    return [
        ("free", "FreeAT, one replay", FreeAT, pgd),
        ("fgsm_rs", "FGSM-RS", FGSMRS, pgd),
        ("n_fgsm", "N-FGSM", NFGSM, pgd),
        ("pgd2", "PGD-2, step eps/2", PGDAT, pgd2),
        ("grad_align", "GradAlign", GradAlign, pgd),
        ("fast_bat", "Fast-BAT", FastBAT, pgd),
        ("friendly", f"FriendlyAT, {steps} steps at most", FriendlyAT, pgd),
        ("dat_pgd", f"DAT, PGD-{steps}", DAT, pgd),
        ("trades", f"TRADES-{steps}", TRADES, pgd),
        ("mart", f"MART-{steps}", MART, pgd),
        ("awp", f"AWP, PGD-{steps}", AWP, pgd),
    ]


def _torchattacks_missing() -> str | None:
    try:
        import torchattacks  # noqa: F401
    except ImportError as error:
        return f"not installed ({error}): pip install 'robustdist[attacks]'"
    return None
