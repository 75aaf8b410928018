"""An objective around another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.objectives.base import Objective

__all__ = ["Wrapper"]

_TRAITS = (
    "needs_second_pass",
    "attacks_predictions",
    "needs_double_backward",
    "reads_backward",
    "follows_progress",
    "replays",
    "replaces_loss",
    "refuses_by_batch",
    "state_is_per_rank",
)


class Wrapper(Objective):
    """Base of objectives that change how another one is computed; everything else is that one's.

    Args:
        base: The other one.
    """

    def __init__(self, base: Objective) -> None:
        self.base = base
        for trait in _TRAITS:
            setattr(self, trait, getattr(base, trait))

    def check_module(self, module: nn.Module) -> None:
        """Refuse what the base objective refuses."""
        super().check_module(module)
        self.base.check_module(module)

    def adapt(self, attack: Attack) -> Attack:
        """Return the inner maximiser of the base objective."""
        return self.base.adapt(attack)

    def trial_targets(self, logits: Tensor, y: Any) -> Any:
        """Return the targets of the base objective."""
        return self.base.trial_targets(logits, y)

    def after_backward(self) -> None:
        """Let the base objective undo what it did."""
        self.base.after_backward()

    def reset(self) -> None:
        """Let the base objective forget."""
        self.base.reset()

    def follow_pruning(self, slice_like: Callable[[str, Tensor], Tensor | None]) -> None:
        """Let the base objective cut what it keeps."""
        self.base.follow_pruning(slice_like)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base objective."""
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the state to the base objective."""
        self.base.load_state_dict(state)
