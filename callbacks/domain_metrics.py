"""The metrics of the domains, out of those that a validation logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from robustdist.errors import UsageError

__all__ = ["DomainMetrics"]


class DomainMetrics:
    """Finds one loss per domain among logged metrics.

    Args:
        monitor: Metric of a domain, with {index} and {name} in the place of its number and name; without them, the part
            of the name before ``/dataloader_idx_<n>``, which Lightning appends where there are several loaders.
        mode: "min" for losses, "max" for accuracies, of which 1 - accuracy is the loss.

    Raises:
        UsageError: If the mode is another.
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode={mode!r} must be min for losses or max for accuracies")
        self.monitor, self.mode = monitor, mode

    @property
    def by_name(self) -> bool:
        """Whether the metrics have the domain in their name instead of belonging to a loader."""
        return "{index}" in self.monitor or "{name}" in self.monitor

    def keys(self, names: Sequence[str]) -> list[str]:
        """Return the name of the metric of every domain."""
        if self.by_name:
            return [
                self.monitor.replace("{index}", str(domain)).replace("{name}", name)
                for domain, name in enumerate(names)
            ]
        if len(names) == 1:
            return [self.monitor]
        return [f"{self.monitor}/dataloader_idx_{domain}" for domain in range(len(names))]

    def losses(self, metrics: Mapping[str, Tensor], names: Sequence[str]) -> list[float]:
        """Return the loss of every domain.

        Raises:
            UsageError: If one is not there; the message lists what is.
        """
        keys = self.keys(names)
        missing = [key for key in keys if key not in metrics]
        if missing:
            raise UsageError(
                f"monitor={self.monitor!r}: validation logged no {', '.join(missing)}; it logged "
                f"{', '.join(sorted(metrics)) or 'nothing'}: name one of these, with {{index}} or {{name}} for the "
                "domain where it is not a metric per validation loader"
            )
        values = [float(metrics[key]) for key in keys]
        return values if self.mode == "min" else [1 - value for value in values]

    def check_loaders(self, num_loaders: int, names: Sequence[str]) -> None:
        """Refuse another number of validation loaders than of domains, where metrics belong to loaders.

        Raises:
            UsageError: If the numbers differ.
        """
        if not self.by_name and num_loaders and num_loaders != len(names):
            raise UsageError(
                f"there are {len(names)} domains ({', '.join(names)}) and {num_loaders} validation loaders: give one "
                "per domain in the same order, or name a metric per domain in monitor with {index} or {name}"
            )
