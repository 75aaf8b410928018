"""The parts of AdversarialTraining."""

__all__: list[str] = []
