"""The parts of StructuredPruning."""

__all__: list[str] = []
