"""Robust evaluation of a module, with or without a Trainer: count, judge the evaluation itself, continue, save."""

from robustdist.evaluation.records import Records
from robustdist.evaluation.saved import SavedExamples, load_examples, remeasure
from robustdist.evaluation.tally import RobustTally

__all__ = ["Records", "RobustTally", "SavedExamples", "load_examples", "remeasure"]
