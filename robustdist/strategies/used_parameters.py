"""Which parameters took part in backward passes since gradients were averaged."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["UsedParameters"]


class UsedParameters:
    """Notes the parameters that got a gradient: DDP's own criterion, also over accumulated batches.

    The value of a gradient would not tell. DDP hands over the gradient of an earlier step for a parameter that is not
    used in this one and whose gradient nobody cleared, as in training two nets by turns, and gives nothing back for it.

    Args:
        module: The module; hooks that :meth:`close` removes are set on its parameters.

    Attributes:
        since_last_sync: Their names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.since_last_sync: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def clear(self) -> None:
        """Begin anew, after a synchronised backward pass."""
        self.since_last_sync = set()

    def close(self) -> None:
        """Stop to watch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self.since_last_sync.add(name)

        return note
