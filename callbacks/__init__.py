"""Callbacks for the Trainer; importing them makes the names of our strategies known to it."""

import robustdist.strategies  # noqa: F401
from robustdist.callbacks.adversarial_training import AdversarialTraining
from robustdist.callbacks.catastrophic_overfitting_guard import CatastrophicOverfittingGuard
from robustdist.callbacks.communication_monitor import CommunicationMonitor
from robustdist.callbacks.domain_reweighting import DomainReweighting
from robustdist.callbacks.learner_tuning import LearnerTuning
from robustdist.callbacks.pruning.files import explain_pruned_files
from robustdist.callbacks.robust_evaluation import RobustEvaluation
from robustdist.callbacks.structured_pruning import StructuredPruning

__all__ = [
    "AdversarialTraining",
    "CatastrophicOverfittingGuard",
    "CommunicationMonitor",
    "DomainReweighting",
    "LearnerTuning",
    "RobustEvaluation",
    "StructuredPruning",
]

explain_pruned_files()
