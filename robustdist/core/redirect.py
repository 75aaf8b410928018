"""One interceptor per strategy: an ordered chain of transforms around ``LightningModule.training_step``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from robustdist.errors import UsageError

__all__ = [
    "StepInterceptor",
    "StepTransform",
    "check_module_can_be_called",
    "check_step_can_be_intercepted",
    "sharding_of",
]

_ATTRIBUTE = "_robustdist_interceptor"

#: Strategies whose inner module cannot be called alone, because a rank holds only a shard of its weights.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class StepTransform(Protocol):
    """Runs in the place of ``training_step``; ``next_step(batch, *args)`` runs the rest of the chain."""

    def __call__(self, next_step: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return what ``training_step`` would return."""
        ...


class StepInterceptor:
    """Puts transforms around the ``training_step`` of the module that a strategy drives.

    ``strategy.training_step`` is wrapped on the instance. While it runs, the chain stands in the place of the
    module's ``training_step``, so the strategy's own method carries it into DDP's forward and the precision context;
    between two steps the module holds nothing of ours. All transforms of a strategy share one interceptor: two
    independent wrappers would drop each other at the first teardown.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._transforms: list[tuple[int, StepTransform]] = []
        self._wrapped: Callable[..., Any] | None = None
        self._shadowed: dict[str, Any] = {}

    @classmethod
    def of(cls, strategy: Any) -> StepInterceptor:
        """Return the interceptor of ``strategy``, made at the first call."""
        found = getattr(strategy, _ATTRIBUTE, None)
        if not isinstance(found, cls):
            found = cls(strategy)
            setattr(strategy, _ATTRIBUTE, found)
        return found

    @property
    def active(self) -> bool:
        """Whether the strategy is wrapped now."""
        return self._wrapped is not None

    def add(self, transform: StepTransform, order: int = 0) -> None:
        """Add a transform; a lower ``order`` runs further outside, equal orders in the order of their addition."""
        if any(existing == transform for _, existing in self._transforms):
            return
        self._transforms.append((order, transform))
        self._transforms.sort(key=lambda entry: entry[0])
        if self._wrapped is None:
            # an instance attribute: Lightning looks the hook up with getattr(strategy, name)
            self._wrapped = self._strategy.training_step
            self._shadowed = {key: value for key, value in vars(self._strategy).items() if key == "training_step"}
            self._strategy.training_step = self._training_step

    def remove(self, transform: StepTransform) -> None:
        """Remove a transform; the strategy gets its own method back with the last one. Unknown ones are ignored.

        If somebody else has wrapped the method since, an empty chain stays inside that wrapper.
        """
        self._transforms = [entry for entry in self._transforms if entry[1] != transform]
        attributes = vars(self._strategy)
        if self._transforms or attributes.get("training_step", self._training_step) != self._training_step:
            return
        if self._wrapped is not None:
            attributes.pop("training_step", None)
            attributes.update(self._shadowed)
            self._wrapped = None
        attributes.pop(_ATTRIBUTE, None)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._wrapped is not None
        module = self._strategy.lightning_module
        attributes = vars(module)
        # torch.compile leaves instance attributes of these names: put back what was there, not the class's method
        before = {name: attributes[name] for name in ("training_step", "forward") if name in attributes}
        chain: Callable[..., Any] = module.training_step
        for _, transform in reversed(self._transforms):
            chain = partial(transform, chain)
        module.training_step = chain
        try:
            return self._wrapped(*args, **kwargs)
        finally:
            # `forward` too: Lightning's redirection leaves it patched when the wrapper raises before the inner call
            for name in ("training_step", "forward"):
                if name in before:
                    attributes[name] = before[name]
                else:
                    attributes.pop(name, None)


def check_module_can_be_called(strategy: Any, option: str) -> None:
    """Refuse strategies under which a rank cannot call the module on its own.

    Raises:
        UsageError: For sharded strategies, naming ``option``.
    """
    sharded = sharding_of(strategy)
    if sharded is not None:
        raise UsageError(
            f"{option} calls the module on its own, which {sharded} cannot do with sharded weights: use strategy='ddp'"
        )


def sharding_of(strategy: Any) -> str | None:
    """Return the name of the strategy if a rank holds only a shard of its weights, else None."""
    names = [base.__name__ for base in type(strategy).__mro__]
    return next((name for name in _SHARDED if name in names), None)


def check_step_can_be_intercepted(strategy: Any, module: Any, *, needs_second_pass: bool, option: str) -> None:
    """Refuse combinations in which the step cannot be transformed.

    Args:
        strategy: The trainer's strategy.
        module: The user's LightningModule.
        needs_second_pass: Whether more than one run of the step makes up the loss.
        option: The option to name in messages, for example "AdversarialTraining(objective=DAT)".

    Raises:
        UsageError: For sharded strategies, steps that take an iterator, and a second pass in manual optimisation.
    """
    check_module_can_be_called(strategy, option)
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UsageError(
            f"{option} replaces the batch, but training_step(dataloader_iter) fetches its own: "
            "write training_step(self, batch, batch_idx)"
        )
    if needs_second_pass and not module.automatic_optimization:
        raise UsageError(
            f"{option} needs more than the step's one pass per batch, which manual optimisation does not allow: "
            "use an objective with one pass (PGDAT), or automatic_optimization=True"
        )
