"""Attacks: ``x_adv = attack(model, x, y)``, with or without a Trainer."""

from robustdist.attacks.base import Attack, AttackResult, Problem
from robustdist.attacks.fgsm import FGSM
from robustdist.attacks.mifgsm import MIFGSM
from robustdist.attacks.noise_fgsm import NoiseFGSM
from robustdist.attacks.pgd import PGD
from robustdist.attacks.schedules import LinearRamp, Piecewise, Schedule
from robustdist.attacks.torch_attack import TorchAttack

__all__ = [
    "FGSM",
    "MIFGSM",
    "PGD",
    "Attack",
    "AttackResult",
    "LinearRamp",
    "NoiseFGSM",
    "Piecewise",
    "Problem",
    "Schedule",
    "TorchAttack",
]
