"""What robustdist raises and warns when the user has to act."""

__all__ = ["RobustDistWarning", "UsageError"]


class UsageError(ValueError):
    """Wrong use or configuration: one sentence that names the option and the remedy.

    The command line turns it into exit status 2 without a traceback.

    Attributes:
        shared: Whether every process of the run raises it, so that one of them is enough to tell.
    """

    shared = False


class RobustDistWarning(UserWarning):
    """A result may not mean what it seems to mean."""
