"""The ``robustdist`` command."""

from robustdist.cli.main import main

__all__ = ["main"]
