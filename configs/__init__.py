"""YAML fragments that ship with robustdist; compose them with repeated ``--config``."""

from pathlib import Path

__all__ = ["path"]


def path(name: str) -> Path:
    """Return the place of a shipped fragment, for example ``path("attack/pgd.yaml")``."""
    return Path(__file__).parent / name
