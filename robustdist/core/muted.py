"""Run a ``training_step`` once more without leaving traces in logs and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

__all__ = ["StepMuter"]

_MetricLike = (Metric, MetricCollection)


class StepMuter:
    """Silences ``log`` and ``log_dict`` of a LightningModule and gives its metrics to stand-ins meanwhile.

    A second pass over the same batch would count it twice in the user's accuracy and log every key twice. Side effects
    in plain Python (counters, lists) cannot be undone.
    """

    def __init__(self) -> None:
        # by identity: the hash of a metric changes with its state. The metric is kept so that no id is used twice.
        self._stand_ins: dict[int, tuple[nn.Module, Any]] = {}

    @contextmanager
    def __call__(self, module: Any) -> Iterator[None]:
        """Mute ``module`` inside the context."""
        swapped: list[tuple[nn.Module, str, nn.Module]] = []
        attributes = vars(module)
        names = ("log", "log_dict")
        before = {name: attributes[name] for name in names if name in attributes}
        try:
            for owner in [part for part in module.modules() if not isinstance(part, _MetricLike)]:
                for name, child in list(owner.named_children()):
                    if isinstance(child, _MetricLike):
                        owner._modules[name] = self._stand_in(child)
                        swapped.append((owner, name, child))
            attributes.update(dict.fromkeys(names, _ignore))
            yield
        finally:
            for name in names:
                attributes.pop(name, None)
            attributes.update(before)
            for owner, name, metric in swapped:
                owner._modules[name] = metric

    def _stand_in(self, metric: Any) -> Any:
        if id(metric) not in self._stand_ins:
            self._stand_ins[id(metric)] = (metric, metric.clone())
        stand_in = self._stand_ins[id(metric)][1]
        stand_in.reset()
        return stand_in


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
