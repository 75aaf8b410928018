"""How many bits a quantiser may use, decided while training runs."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from robustdist.errors import UsageError

__all__ = ["BitController", "BitSchedule", "FixedBits", "check_bits"]

_LOWEST, _HIGHEST = 2, 8  # what QSGD packs


class BitController(ABC):
    """Bits per entry for the next synchronised step.

    A controller runs on every rank and talks to nobody: fed with values that are bit-identical on all ranks, it decides
    alike on all of them. It draws from no global generator. A change of bits leaves residuals alone, which are in
    gradient units.

    Attributes:
        bits: The present decision.
    """

    bits: int

    @abstractmethod
    def observe(self, loss: float, *, compute_seconds: float, comm_seconds: float) -> int:
        """See one synchronised step that was executed, return the bits for the next one.

        Args:
            loss: Training loss of the step, averaged over the ranks.
            compute_seconds: Time of the step without ``comm_seconds``, averaged over the ranks.
            comm_seconds: Time for which the step waited for communication, averaged over the ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to decide as this one would: tensors and plain types, equal on all ranks."""
        return {"policy": type(self).__name__, "bits": self.bits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            UsageError: If it comes from a controller of another class.
        """
        if state.get("policy") != type(self).__name__:
            raise UsageError(
                f"bits: the state is that of {state.get('policy')} and this is {type(self).__name__}: "
                "resume with the controller that saved it"
            )

    def settings(self) -> dict[str, Any]:
        """Return the arguments this controller was made with; equal on all ranks in a sound run."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"


class FixedBits(BitController):
    """The same bits for ever.

    Args:
        bits: 2 to 8.

    Raises:
        UsageError: If ``bits`` is out of range.
    """

    def __init__(self, bits: int = 8) -> None:
        self.bits = check_bits(bits, "bits")

    def observe(self, loss: float, *, compute_seconds: float, comm_seconds: float) -> int:
        """Return the bits."""
        return self.bits


class BitSchedule(BitController):
    """Bits that change at given steps.

    Args:
        schedule: Bits, 2 to 8, by the number of the first synchronised step they are used in; 0 must be there.

    Raises:
        UsageError: If the schedule is not such a mapping.

    Example:
        >>> controller = BitSchedule({0: 2, 2: 4})
        >>> [controller.bits] + [controller.observe(1.0, compute_seconds=1.0, comm_seconds=1.0) for _ in range(3)]
        [2, 2, 4, 4]
    """

    def __init__(self, schedule: Mapping[int, int]) -> None:
        steps = list(schedule)
        if 0 not in steps or not all(isinstance(step, int) and step >= 0 for step in steps):
            raise UsageError(f"schedule={schedule!r} must map numbers of steps to bits and begin at 0, as in {{0: 8}}")
        self.schedule = {step: check_bits(schedule[step], f"schedule[{step}]") for step in sorted(steps)}
        self.step = 0
        self.bits = self.schedule[0]

    def observe(self, loss: float, *, compute_seconds: float, comm_seconds: float) -> int:
        """Count the step and return the bits for the next one."""
        self.step += 1
        self.bits = self.schedule.get(self.step, self.bits)
        return self.bits

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the number of steps."""
        return {**super().state_dict(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the step of the state, by the schedule of this object."""
        super().load_state_dict(state)
        self.step = int(state["step"])
        self.bits = self.schedule[max(step for step in self.schedule if step <= self.step)]


def check_bits(bits: int, option: str) -> int:
    """Return ``bits`` if it is a number of bits that quantisers pack.

    Raises:
        UsageError: If it is not.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not _LOWEST <= bits <= _HIGHEST:
        raise UsageError(f"{option}={bits!r} must be a whole number of bits from {_LOWEST} to {_HIGHEST}")
    return bits
