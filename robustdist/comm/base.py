"""What a codec is: a tensor in, a counted number of bytes on the wire, a tensor out."""

from __future__ import annotations

import inspect
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robustdist.comm.error_feedback import ErrorFeedback, Memory
from robustdist.comm.scratch import scratch
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["Compressor", "Payload", "RememberingCompressor", "check_block"]

#: Floating-point types a codec takes, in the order of their number in :meth:`Payload.to_bytes`.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Payload:
    """What is sent for one tensor.

    Attributes:
        data: Shape (num_bytes,), uint8, contiguous: all that goes on the wire between ranks that know the shape.
        shape: Shape of the tensor.
        dtype: Its floating-point type.
    """

    data: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return len(self.data)

    def to_bytes(self) -> bytes:
        """Return bytes that :meth:`from_bytes` needs nothing else for: type, shape, then ``data``."""
        head = struct.pack(f"<BB{len(self.shape)}q", DTYPES.index(self.dtype), len(self.shape), *self.shape)
        raw = bytearray(len(head) + self.num_bytes)
        raw[: len(head)] = head
        if self.num_bytes:
            torch.frombuffer(raw, dtype=torch.uint8, offset=len(head)).copy_(self.data)
        return bytes(raw)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Payload:
        """Rebuild a payload on the CPU.

        Raises:
            UsageError: If ``raw`` does not begin as a payload does.
        """
        try:
            number, dims = struct.unpack_from("<BB", raw)
            shape, dtype = struct.unpack_from(f"<{dims}q", raw, 2), DTYPES[number]
        except (struct.error, IndexError):
            raise UsageError(f"these {len(raw)} bytes are no payload: pass what Payload.to_bytes() returned") from None
        body = bytearray(raw[2 + 8 * dims :])
        data = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
        return cls(data, shape, dtype)


class Compressor(ABC):
    """Base of all codecs; usable on any tensor, with or without ``torch.distributed``.

    A codec has two levels. :meth:`encode` and :meth:`decode` work between flat tensors and byte buffers of the caller;
    all ranks that decode the same bytes get the same bits. :meth:`compress` and :meth:`decompress` do the same for
    tensors of any shape. A non-finite entry is never lost: where it was, or over the whole block, tile or tensor that
    held it, the decoded values are not finite. An all-zero block decodes to exact zeros.

    Args:
        seed: Seed of the draws, which depend on (seed, rank, step, name) alone.

    Attributes:
        unbiased: Whether the expectation of the decoded tensor is the input.
        linear: Whether payloads of several ranks may be added value by value, see :meth:`summable`.
        has_memory: Whether :meth:`make_memory` is part of the method, with or without error feedback.
        head: Bytes at the start of a payload that ranks have alike; :meth:`summable` leaves them out.
        block: Entries that share something in the payload; parameters are laid out at multiples of it.
    """

    unbiased: bool = False
    linear: bool = False
    has_memory: bool = False
    block: int = 1
    head: int = 0

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self._calls: dict[str, int] = {}

    # --- what a codec has to write

    @abstractmethod
    def payload_bytes(self, numel: int | Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes on the wire for ``numel`` elements of type ``dtype``; a shape may be given too."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, *, rank: int = 0, step: int = 0, name: str = "") -> None:
        """Write the payload of ``x`` into ``out``.

        Args:
            x: Contiguous, floating point, any shape.
            out: Shape (payload_bytes(x.numel(), x.dtype),), uint8, at a multiple of 4 bytes in its storage.
            rank: Rank of the process; codecs whose ranks have to draw alike ignore it.
            step: Number of the synchronised step.
            name: Name of the parameter or segment.
        """

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Overwrite ``out`` with what ``data`` stands for, or add ``alpha`` times it.

        Args:
            data: Bytes that :meth:`encode` wrote, at a multiple of 4 bytes in their storage.
            out: Contiguous, with the shape of the encoded tensor.
            alpha: None to overwrite.
        """

    def encode_parts(
        self,
        numel: int,
        load: Callable[[int, int], Tensor],
        out: Tensor,
        keep: Callable[[int, Tensor, Tensor], object] | None = None,
        *,
        rank: int = 0,
        step: int = 0,
        name: str = "",
    ) -> None:
        """Write the payload of ``numel`` float32 elements that come in parts, each while it is in the caches.

        Args:
            numel: Number of elements.
            load: Called with begin and length of each part in order; returns it, valid until the next call.
            out: As in :meth:`encode`.
            keep: Called with begin, the part and what receivers decode of it; may use both as work space.
            rank: As in :meth:`encode`.
            step: As in :meth:`encode`.
            name: As in :meth:`encode`.
        """
        x = load(0, numel)
        self.encode(x, out, rank=rank, step=step, name=name)
        if keep is not None:
            sent = scratch("sent", numel, torch.float32, out.device)
            self.decode(out, sent)
            keep(0, x, sent)

    def decode_parts(
        self, numel: int, payloads: Sequence[Tensor], store: Callable[[int, Tensor], object], *, alpha: float = 1.0
    ) -> None:
        """Add up what several payloads stand for, times ``alpha``, in parts.

        Args:
            numel: Number of elements.
            payloads: As in :meth:`decode`, one or more; they are added in their order.
            store: Called with begin and sum (float32, valid during the call) of each part in order.
            alpha: Factor.
        """
        total = scratch("sum", numel, torch.float32, payloads[0].device).zero_()
        for data in payloads:
            self.decode(data, total, alpha=alpha)
        store(0, total)

    def omega(self, numel: int) -> float | None:
        r"""Smallest known :math:`\omega` with :math:`E\|C(x)-x\|^2 \le \omega\|x\|^2`; None for a biased codec."""
        return None

    def delta(self, numel: int) -> float | None:
        r"""Largest known :math:`\delta` with :math:`E\|C(x)-x\|^2 \le (1-\delta)\|x\|^2`, or None if there is none.

        A positive value is what error feedback needs.
        """
        omega = self.omega(numel)
        return None if omega is None or omega >= 1 else 1 - omega

    def contractive(self) -> Compressor:
        """Return the form of this codec that error feedback may be used with: itself, unless that only adds noise."""
        return self

    def fill(self, known: Tensor) -> Tensor | None:
        """Return a value for entries that a block lacks, so that the scale is that of the known ones; None for 0."""
        return None

    def make_memory(self, dtype: torch.dtype = torch.float32) -> Memory:
        """Return what a sender keeps between steps; ``dtype`` is the type it is stored in."""
        return ErrorFeedback(dtype=dtype)

    def summable(self, data: Tensor) -> Tensor:
        """Return the part of a payload that an all-reduce may add up, as a float view; only if ``linear``."""
        raise NotImplementedError(f"payloads of {type(self).__name__} cannot be added")

    # --- what is the same for all

    @torch.no_grad()
    def compress(self, x: Tensor, *, rank: int = 0, step: int | None = None, name: str = "") -> Payload:
        """Encode a tensor of any shape.

        Args:
            x: Floating point; entries of float64 are rounded to float32 by all codecs but :class:`Identity`.
            rank: Rank of the process.
            step: Number of the step; by default calls are counted per ``name``.
            name: Name of the tensor.

        Raises:
            UsageError: If ``x`` is not a dense floating-point tensor.
        """
        _check_input(x)
        if step is None:
            step = self._calls.get(name, 0)
            self._calls[name] = step + 1
        x = x.contiguous()
        data = torch.empty(self.payload_bytes(tuple(x.shape), x.dtype), dtype=torch.uint8, device=x.device)
        self.encode(x, data, rank=rank, step=step, name=name)
        return Payload(data, tuple(x.shape), x.dtype)

    @torch.no_grad()
    def decompress(self, payload: Payload, *, name: str = "") -> Tensor:
        """Return the tensor that ``payload`` stands for, with the shape and type of the one compressed.

        Args:
            payload: From :meth:`compress` of a codec with the same settings.
            name: Name of the tensor; only codecs that keep a memory use it.

        Raises:
            UsageError: If the payload is too long or too short for this codec.
        """
        expected = self.payload_bytes(payload.shape, payload.dtype)
        if payload.num_bytes != expected:
            raise UsageError(
                f"the payload has {payload.num_bytes} bytes where {self!r} makes {expected} for shape {payload.shape}: "
                "decompress with the codec that compressed"
            )
        out = torch.empty(payload.shape, dtype=payload.dtype, device=payload.data.device)
        self.decode(payload.data, out)
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly: tensors and plain types."""
        return {"calls": dict(self._calls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._calls = dict(state["calls"])

    def settings(self) -> dict[str, Any]:
        """Return the arguments this codec was made with; equal on all ranks in a sound run."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"

    def generator(self, device: torch.device, *key: int | str) -> torch.Generator:
        """Return a generator whose draws depend on the seed of this codec and on ``key`` alone."""
        return torch.Generator(device).manual_seed(derive_seed(self.seed, *key))


class RememberingCompressor(Compressor):
    """A method whose memory is part of it: :meth:`compress` goes through ``memory``, :meth:`encode` does not."""

    has_memory = True

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.memory = self.make_memory()

    @torch.no_grad()
    def compress(self, x: Tensor, *, rank: int = 0, step: int | None = None, name: str = "") -> Payload:
        """Encode what the memory makes of ``x``, and remember what was left out; see :meth:`Compressor.compress`."""
        _check_input(x)
        value = self.memory.prepare(name, x.to(torch.float32, copy=True).contiguous().view(-1))
        payload = super().compress(value.view(x.shape), rank=rank, step=step, name=name)
        sent = torch.empty_like(value)
        self.decode(payload.data, sent.view(x.shape))
        self.memory.update(name, value, sent)
        self.memory.commit()
        return replace(payload, dtype=x.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the memory."""
        return {**super().state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.memory.load_state_dict(state["memory"])


def count(numel: int | Sequence[int]) -> int:
    """Return the number of elements of a shape, or the number itself."""
    return numel if isinstance(numel, int) else math.prod(numel)


def check_block(block: int) -> int:
    """Return ``block`` if it is a block size that codecs can pack.

    Raises:
        UsageError: If it is not.
    """
    if check_count(block, "block") % 8:
        raise UsageError(f"block={block} must be a multiple of 8, such as the default 512")
    return block


def _check_input(x: Tensor) -> None:
    if x.layout != torch.strided or x.dtype not in DTYPES:
        raise UsageError(f"x must be a dense floating-point tensor, not {x.layout} of {x.dtype}: convert it first")
