"""Objectives: the outer loss of adversarial training, with or without a Trainer."""

from robustdist.objectives.base import Objective, ObjectiveContext
from robustdist.objectives.dat import DAT
from robustdist.objectives.pgd_at import PGDAT

__all__ = ["DAT", "PGDAT", "Objective", "ObjectiveContext"]
