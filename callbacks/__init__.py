"""Callbacks for the Trainer."""

from robustdist.callbacks.adversarial_training import AdversarialTraining
from robustdist.callbacks.catastrophic_overfitting_guard import CatastrophicOverfittingGuard
from robustdist.callbacks.robust_evaluation import RobustEvaluation

__all__ = ["AdversarialTraining", "CatastrophicOverfittingGuard", "RobustEvaluation"]
