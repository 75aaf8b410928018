"""Attacks: ``x_adv = attack(model, x, y)``, with or without a Trainer."""

from robustdist.attacks.apgd import APGD
from robustdist.attacks.auto_attack import AutoAttack
from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.attacks.fab import FAB
from robustdist.attacks.fgsm import FGSM
from robustdist.attacks.friendly_pgd import FriendlyPGD
from robustdist.attacks.mifgsm import MIFGSM
from robustdist.attacks.noise_fgsm import NoiseFGSM
from robustdist.attacks.pgd import PGD
from robustdist.attacks.schedules import LinearRamp, Piecewise, Schedule
from robustdist.attacks.square import Square
from robustdist.attacks.token_pgd import TokenPGD
from robustdist.attacks.torch_attack import TorchAttack
from robustdist.core.space import Embeddings, Pixels

__all__ = [
    "APGD",
    "FAB",
    "FGSM",
    "MIFGSM",
    "PGD",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "Embeddings",
    "FriendlyPGD",
    "LinearRamp",
    "NoiseFGSM",
    "Piecewise",
    "Pixels",
    "Problem",
    "Schedule",
    "Square",
    "TokenPGD",
    "TorchAttack",
]
