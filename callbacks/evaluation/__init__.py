"""The parts of RobustEvaluation."""

__all__: list[str] = []
