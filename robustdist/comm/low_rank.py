"""Low-rank approximation of matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robustdist.comm.base import Compressor
from robustdist.comm.tiles import floats
from robustdist.comm.verdicts import is_finite
from robustdist.types import check_count

__all__ = ["PowerSGD", "orthonormalise"]


class PowerSGD(Compressor):
    r"""One step of a power iteration per tensor, from where the last one ended.

    .. math:: P = \mathrm{orth}(M Q), \qquad Q \leftarrow M^\top P, \qquad \hat M = P Q^\top

    M is the tensor as a matrix (first dimension, rest); one of less than two dimensions is laid out as a square, filled
    up with zeros. P has shape (n, r), Q shape (m, r); where they are not smaller than M, M itself is sent. The start is
    drawn from (seed, name, shape), the same on all ranks. A zero or non-finite M leaves Q as it was.

    The payload depends on the shape: :meth:`payload_bytes` of a number is that of a flat tensor.

    Args:
        rank: Number of columns r of P and Q.
        seed: Seed of the start.

    Raises:
        UsageError: If ``rank`` is not a positive whole number.

    References:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization".

    Example:
        >>> codec = PowerSGD(rank=1)
        >>> codec.payload_bytes((100, 50))
        600
        >>> outer = torch.outer(torch.arange(3.0), torch.ones(4))
        >>> bool(torch.allclose(codec.decompress(codec.compress(outer)), outer))
        True
    """

    def __init__(self, rank: int = 1, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.rank = check_count(rank, "rank")
        self._start: dict[str, Tensor] = {}

    def delta(self, numel: int) -> float:
        r"""Return :math:`r / \sqrt d` of a square matrix, in expectation over the random start."""
        side = math.isqrt(max(numel - 1, 0)) + 1
        return min(1.0, self.rank / side)

    def dims(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return n, m and r for a tensor of this shape; r = 0 where the tensor is sent as it is."""
        numel = math.prod(shape)
        if len(shape) >= 2:
            rows, columns = shape[0], math.prod(shape[1:])
        else:
            columns = math.isqrt(max(numel - 1, 0)) + 1
            rows = -(-numel // columns)
        rank = min(self.rank, rows, columns)
        return rows, columns, rank if rank * (rows + columns) < numel else 0

    def payload_bytes(self, numel: int | Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return 4 bytes per number of P and Q, or of M; ``numel`` may be a shape."""
        shape = (numel,) if isinstance(numel, int) else numel
        rows, columns, rank = self.dims(shape)
        return 4 * (rank * (rows + columns) if rank else math.prod(shape))

    def encode(self, x: Tensor, out: Tensor, *, rank: int = 0, step: int = 0, name: str = "") -> None:
        """Iterate once; P and Q of the ranks could be averaged in between, which this does not."""
        rows, columns, width = self.dims(x.shape)
        if width == 0:
            floats(out).copy_(x.view(-1))
            return
        matrix = as_matrix(x, rows, columns)
        # in memory of its own: the last bits of a product depend on the alignment of the operands
        left = torch.mm(self.start(name, width, columns, x.device), matrix.T)
        orthonormalise(left)
        right = torch.mm(left, matrix)
        for target, factor in zip(self.factors(out, x.shape), (left, right), strict=True):
            target.copy_(factor)
        if is_finite(right):
            self.keep_start(name, right)
        else:
            floats(out).fill_(math.nan)  # a column of P that became zero would hide it

    def decode(self, data: Tensor, out: Tensor, *, alpha: float | None = None) -> None:
        """Multiply the factors."""
        if self.dims(out.shape)[2] == 0:
            values = floats(data)
        else:
            left, right = (factor.clone() for factor in self.factors(data, out.shape))
            values = torch.mm(left.T, right).view(-1)[: out.numel()]
        if alpha is None:
            out.view(-1).copy_(values)
        else:
            out.view(-1).add_(values, alpha=alpha)

    def factors(self, data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return views of P and Q in a payload, transposed: shapes (r, n) and (r, m)."""
        rows, columns, width = self.dims(shape)
        values = floats(data)
        return values[: width * rows].view(width, rows), values[width * rows :].view(width, columns)

    def start(self, name: str, width: int, columns: int, device: torch.device) -> Tensor:
        """Return the transposed Q of the last step, shape (r, m), or a random one before the first."""
        kept = self._start.get(name)
        if kept is None or kept.shape != (width, columns):
            drawn = torch.empty(width, columns)
            kept = drawn.normal_(generator=self.generator(torch.device("cpu"), "start", name, width, columns))
        return kept.to(device)

    def keep_start(self, name: str, right: Tensor) -> None:
        """Keep Q for the next step; a direction that vanished stays as it was."""
        old = self.start(name, right.shape[0], right.shape[1], right.device)
        self._start[name] = torch.where(right.abs().amax(1, keepdim=True) > 0, right, old)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with Q by name."""
        return {**super().state_dict(), "start": {name: right.clone() for name, right in self._start.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._start = {name: right.clone() for name, right in state["start"].items()}


def as_matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return ``x`` as a float32 matrix, filled up with zeros."""
    flat = x.view(-1).float()
    if len(flat) < rows * columns:
        flat = torch.nn.functional.pad(flat, (0, rows * columns - len(flat)))
    return flat.view(rows, columns)


def orthonormalise(rows: Tensor) -> None:
    """Make the rows of an (r, n) matrix orthonormal in place, from the first to the last.

    Each is freed twice of its part in the earlier ones, which is enough for float32. A row that is zero, or that the
    earlier ones span, becomes zero: no division by its length ever takes place.
    """
    for index, row in enumerate(rows):
        earlier = rows[:index]
        before = torch.linalg.vector_norm(row)
        for _ in range(2 if index else 0):
            row.sub_((earlier @ row) @ earlier)
        length = torch.linalg.vector_norm(row)
        # what rounding leaves of a dependent row is noise, not a direction
        usable = (length > 1e-6 * before) | torch.isnan(length)
        row.mul_(torch.where(usable, length.reciprocal(), torch.zeros_like(length)))
