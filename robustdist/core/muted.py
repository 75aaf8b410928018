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
    """Silences ``log`` and ``log_dict`` of a LightningModule and its parts; gives its metrics to stand-ins meanwhile.

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
        names = ("log", "log_dict")
        # a LightningModule inside another one logs through the same trainer
        parts = [part for part in module.modules() if part is module or callable(getattr(part, "log_dict", None))]
        loggers = [vars(part) for part in parts]
        before = [{name: attributes[name] for name in names if name in attributes} for attributes in loggers]
        try:
            for owner in [part for part in module.modules() if not isinstance(part, _MetricLike)]:
                # not named_children(), which leaves out the second name of the same metric
                for name, child in list(owner._modules.items()):
                    if isinstance(child, _MetricLike):
                        owner._modules[name] = self._stand_in(child)
                        swapped.append((owner, name, child))
            for attributes in loggers:
                attributes.update(dict.fromkeys(names, _ignore))
            yield
        finally:
            for attributes, kept in zip(loggers, before, strict=True):
                for name in names:
                    attributes.pop(name, None)
                attributes.update(kept)
            for owner, name, metric in swapped:
                owner._modules[name] = metric

    def _stand_in(self, metric: Any) -> Any:
        if id(metric) not in self._stand_ins:
            self._stand_ins[id(metric)] = (metric, metric.clone())
        stand_in = self._stand_ins[id(metric)][1]
        # the metric may have moved since its stand-in was made: between two fits, for example
        for own, other in zip(_metrics(stand_in), _metrics(metric), strict=False):
            if own.device != other.device:
                own.to(other.device)
        stand_in.reset()
        return stand_in


def _metrics(module: nn.Module) -> list[Metric]:
    return [part for part in module.modules() if isinstance(part, Metric)]


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
