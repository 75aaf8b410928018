"""Attacks: ``x_adv = attack(model, x, y)``, with or without a Trainer."""

from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.attacks.fgsm import FGSM
from robustdist.attacks.mifgsm import MIFGSM
from robustdist.attacks.noise_fgsm import NoiseFGSM
from robustdist.attacks.pgd import PGD
from robustdist.attacks.schedules import LinearRamp, Piecewise, Schedule
from robustdist.attacks.token_pgd import TokenPGD
from robustdist.attacks.torch_attack import TorchAttack
from robustdist.core.space import Embeddings, Pixels

__all__ = [
    "FGSM",
    "MIFGSM",
    "PGD",
    "Attack",
    "AttackResult",
    "Embeddings",
    "LinearRamp",
    "NoiseFGSM",
    "Piecewise",
    "Pixels",
    "Problem",
    "Schedule",
    "TokenPGD",
    "TorchAttack",
]
