"""YAML fragments that ship with robustdist; compose them with repeated ``--config``."""

from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["path"]


def path(name: str) -> Traversable:
    """Return the place of a shipped fragment, for example ``path("attack/pgd.yaml")``."""
    return files(__package__).joinpath(name)
