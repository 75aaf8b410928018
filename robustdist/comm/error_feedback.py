"""What a sender remembers between two steps: the error of its codec, kept by name of the parameter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from robustdist.comm.verdicts import is_finite
from robustdist.errors import UsageError

__all__ = ["ErrorFeedback", "Memory"]


class Memory(ABC):
    """Vectors kept per parameter name, with a way back.

    One step of a parameter is :meth:`prepare`, the codec, :meth:`update`, the collective, :meth:`finish`. Changes stay
    provisional until :meth:`commit`; :meth:`rollback` undoes all since then, as a step that a gradient scaler skips
    needs. Values are in units of the gradient without loss scale, so a change of scale leaves them valid; ``scale``
    is the factor that the gradients of this step carry. A non-finite value never enters.

    Args:
        dtype: Type in which the vectors are stored.
    """

    slots: ClassVar[tuple[str, ...]]

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._changed: dict[str, dict[str, Tensor]] = {}
        self._spare: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def prepare(self, name: str, grad: Tensor, *, scale: float = 1.0) -> Tensor:
        """Turn ``grad`` (flat, float32) in place into what the codec gets, and return it."""

    @abstractmethod
    def update(self, name: str, value: Tensor, sent: Tensor, *, scale: float = 1.0) -> None:
        """Remember what the payload leaves out.

        Args:
            name: Name of the parameter.
            value: What :meth:`prepare` returned; used as work space.
            sent: What receivers decode of it; used as work space.
            scale: As in :meth:`prepare`.
        """

    def finish(self, name: str, mean: Tensor, *, scale: float = 1.0) -> Tensor:
        """Take the mean of all ranks, return the gradient for the optimiser.

        A non-finite mean, which all ranks see alike, undoes the step of this parameter on all of them.
        """
        if not is_finite(mean):
            self.undo(name)
        return mean

    def dense(self, name: str, mean: Tensor, *, scale: float = 1.0) -> Tensor:
        """Take the exact mean of a parameter that is not encoded; return, in its place, what the optimiser gets."""
        return mean

    # --- transactions

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the changes since the last call final, of all parameters or of some."""
        for name in list(self._changed):
            if names is None or self._parameter(name) in names:
                if name in self._kept:
                    self._spare[name] = self._kept[name]
                self._kept[name] = self._changed.pop(name)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Undo the changes since the last :meth:`commit`, of all parameters or of some."""
        for name in list(self._changed):
            if names is None or self._parameter(name) in names:
                self.undo(name)

    def undo(self, name: str) -> None:
        """Undo the changes of one parameter since the last :meth:`commit`."""
        if name in self._changed:
            self._spare[name] = self._changed.pop(name)

    def drop(self, name: str) -> None:
        """Forget a parameter, for example one that was pruned away."""
        for vectors in (self._kept, self._changed, self._spare):
            vectors.pop(name, None)

    # --- state

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of the committed vectors: ``{slot: {name: flat tensor}}``."""
        return {
            slot: {name: vectors[slot].clone() for name, vectors in self._kept.items() if slot in vectors}
            for slot in self.slots
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over copies of what :meth:`state_dict` returned; everything else is forgotten.

        Raises:
            UsageError: If the state is that of another kind of memory.
        """
        if set(state) != set(self.slots):
            raise UsageError(
                f"the state holds {sorted(state)} where {type(self).__name__} keeps {sorted(self.slots)}: "
                "resume with the compressor that saved it, or reset the memory"
            )
        self._kept, self._changed, self._spare = {}, {}, {}
        for slot, vectors in state.items():
            for name, vector in vectors.items():
                self._kept.setdefault(name, {})[slot] = vector.detach().to(self.dtype, copy=True).flatten()

    def reset(self) -> None:
        """Forget everything."""
        self._kept, self._changed, self._spare = {}, {}, {}

    def get(self, name: str, slot: str | None = None) -> Tensor | None:
        """Return the latest vector of ``name``, provisional or not, or None before its first step."""
        vectors = self._changed.get(name) or self._kept.get(name, {})
        return vectors.get(slot or self.slots[0])

    def norm(self) -> float:
        """Euclidean norm of the first slot over all parameters."""
        names = {**self._kept, **self._changed}
        vectors = [vector for name in names if (vector := self.get(name)) is not None]
        return math.sqrt(sum(float(torch.linalg.vector_norm(vector.float())) ** 2 for vector in vectors))

    # --- for subclasses

    def _parameter(self, name: str) -> str:
        """Return the parameter that the vectors of ``name`` belong to."""
        return name

    def _put(self, name: str, slot: str, value: Tensor) -> None:
        """Write a provisional vector; the other ones of the name keep their values."""
        if name not in self._changed:
            others = {other: vector for other, vector in self._kept.get(name, {}).items() if other != slot}
            self._changed[name] = {other: self._buffer(name, other, vector) for other, vector in others.items()}
        vectors = self._changed[name]
        if slot in vectors:
            vectors[slot].copy_(value)
        else:
            vectors[slot] = self._buffer(name, slot, value)

    def _buffer(self, name: str, slot: str, value: Tensor) -> Tensor:
        """Return a copy of ``value``."""
        return self._vector(name, slot, value.numel(), value.device).copy_(value)

    def _vector(self, name: str, slot: str, numel: int, device: torch.device) -> Tensor:
        """Return an uninitialised vector, one that is no longer used where there is one."""
        vector = self._spare.get(name, {}).pop(slot, None)
        if vector is None or len(vector) != numel or vector.device != device:
            vector = torch.empty(numel, dtype=self.dtype, device=device)
        return vector

    def _matching(self, name: str, slot: str, like: Tensor) -> Tensor | None:
        """Return the latest vector, checked for its length."""
        return self._latest(name, slot, like.numel(), like.device)

    def _latest(self, name: str, slot: str, numel: int, device: torch.device) -> Tensor | None:
        vector = self.get(name, slot)
        if vector is not None and len(vector) != numel:
            raise UsageError(
                f"the {slot} of {name!r} has {len(vector)} elements and its gradient {numel}: "
                "drop the name after changing the size of a parameter"
            )
        return vector if vector is None else vector.to(device)


class ErrorFeedback(Memory):
    r"""Adds to each gradient what earlier payloads left out.

    .. math:: v_t = g_t + e_t, \qquad \text{send } C(v_t), \qquad e_{t+1} = v_t - C(v_t)

    so that :math:`\sum_t C(v_t) = \sum_t g_t - e_{T+1}`: nothing is lost, only delayed. Needs a contractive codec, see
    :meth:`~robustdist.comm.Compressor.contractive`. The residual is in gradient units and not multiplied by a learning
    rate.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes".
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
        Speech DNNs".

    Example:
        >>> from robustdist.comm import Sign
        >>> memory, codec = ErrorFeedback(), Sign()
        >>> v = memory.prepare("weight", torch.tensor([3.0, -1.0]))
        >>> sent = codec.decompress(codec.compress(v))
        >>> memory.update("weight", v, sent)
        >>> memory.get("weight")  # [3, -1] - [2, -2]
        tensor([1., 1.])
    """

    slots = ("residual",)

    def prepare(self, name: str, grad: Tensor, *, scale: float = 1.0) -> Tensor:
        """Add the residual."""
        residual = self._matching(name, "residual", grad)
        return grad if residual is None else grad.add_(residual, alpha=scale)

    def update(self, name: str, value: Tensor, sent: Tensor, *, scale: float = 1.0) -> None:
        """Keep what the payload leaves out of ``value``."""
        value.sub_(sent)
        if scale != 1.0:
            value.div_(scale)
        if is_finite(value):
            self._put(name, "residual", value)

    def open(self, name: str, numel: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Return the latest residual, None if it is zero, and the provisional one, which has to be written.

        Both may be the same vector: where something is written, read there first.
        """
        kept = self._latest(name, "residual", numel, device)
        if name not in self._changed:
            self._changed[name] = {"residual": self._vector(name, "residual", numel, device)}
        return kept, self._changed[name]["residual"]

    def add(self, name: str, numel: int, offset: int, error: Tensor) -> None:
        """Add ``error`` to the residual from ``offset`` on, for good: it was kept elsewhere until now."""
        if name not in self._kept:
            self._kept[name] = {"residual": torch.zeros(numel, dtype=self.dtype, device=error.device)}
        for vectors in (self._kept, self._changed):
            if name in vectors:
                kept = vectors[name]["residual"]  # one that was loaded may be on the CPU
                kept[offset : offset + len(error)].add_(error.to(kept.device))
