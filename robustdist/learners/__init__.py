"""Fine-tuning through low-rank pairs beside frozen linear layers."""

from robustdist.learners.pair import LowRankPair
from robustdist.learners.tuning import Learners

__all__ = ["Learners", "LowRankPair"]
