"""Objectives: the outer loss of adversarial training, with or without a Trainer."""

from robustdist.objectives.awp import AWP
from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.con_adv import ConAdv
from robustdist.objectives.dat import DAT
from robustdist.objectives.fast_bat import FastBAT
from robustdist.objectives.fgsm_rs import FGSMRS
from robustdist.objectives.free_at import FreeAT
from robustdist.objectives.free_lb import FreeLB
from robustdist.objectives.friendly_at import FriendlyAT
from robustdist.objectives.grad_align import GradAlign
from robustdist.objectives.mart import MART
from robustdist.objectives.n_fgsm import NFGSM
from robustdist.objectives.pgd_at import PGDAT
from robustdist.objectives.trades import TRADES

__all__ = [
    "AWP",
    "DAT",
    "FGSMRS",
    "MART",
    "NFGSM",
    "PGDAT",
    "TRADES",
    "ConAdv",
    "FastBAT",
    "FreeAT",
    "FreeLB",
    "FriendlyAT",
    "GradAlign",
    "Objective",
    "ObjectiveContext",
]
