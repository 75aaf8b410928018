"""The batches of all processes as one batch of the user's kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from robustdist.comm.importance import (
    SCORES,
    Score,
    importance,
    inclusion_probabilities,
    repeats,
    systematic_draw,
    top_rows,
)
from robustdist.comm.sample_exchange import SampleExchange
from robustdist.core.batch import BatchAdapter, Key, Located
from robustdist.core.containers import leaves, replaced, shown
from robustdist.core.forward import Forward, bind_forward, guarded_logits
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.types import Number, parse_number

__all__ = ["Select", "Selection", "UnionBatch", "joined"]

Select: TypeAlias = Literal["all", "top", "importance"]


class UnionBatch(NamedTuple):
    """The union of the batches of all processes.

    Attributes:
        batch: A batch of the user's kind.
        own: The part of it that came from this process; with repeated samples there is none.
        factor: What the loss has to be multiplied with.
        digests: The hash of the weights of each process.
    """

    batch: Any
    own: Any
    factor: float
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """Which samples of a batch are sent; see :class:`~robustdist.strategies.QuantizedDataStrategy` for the options.

    Raises:
        UsageError: If options exclude each other.
    """

    select: Select = "all"
    ratio: Number = 1.0
    score: Score = "gradient"
    forward: Forward = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.select not in ("all", "top", "importance"):
            raise UsageError(f"select={self.select!r} must be 'all', 'top' or 'importance'")
        if self.score not in SCORES:
            raise UsageError(f"score={self.score!r} must be one of {', '.join(SCORES)}")
        if not 0 < self.share <= 1:
            raise UsageError(f"ratio={self.ratio!r} must be above 0 and at most 1: the share of a batch that is sent")
        if self.select == "all" and self.share < 1:
            raise UsageError(f"ratio={self.ratio!r} leaves open what to send: set select='top' or 'importance'")

    @property
    def share(self) -> float:
        """Share of a batch that is sent."""
        return parse_number(self.ratio, "ratio")

    def chosen(
        self, module: nn.Module, batch: Any, located: Located, tensors: list[Tensor], rank: int, step: int
    ) -> list[Tensor]:
        """Return the samples to send, with their probabilities as one more entry if these matter.

        Raises:
            UsageError: If the module gives no logits, or the target is no class index.
        """
        if self.select == "all":
            return tensors
        x = located.x
        count = max(1, math.ceil(self.share * len(x) - 1e-9))
        seed = derive_seed(self.seed, "score", step)
        scores = importance(
            guarded_logits(module, bind_forward(module, self.forward, batch), x, seed=seed), located.y, self.score
        )
        if self.select == "top":
            rows = top_rows(scores, count).to(x.device)
            return [tensor[rows] for tensor in tensors]
        probabilities = inclusion_probabilities(scores, count)
        drawn = systematic_draw(probabilities, count, self.seed, "select", rank, step)
        rows = drawn.to(x.device)
        return [*(tensor[rows] for tensor in tensors), probabilities[drawn].float().to(x.device)]


def joined(
    batch: Any,
    *,
    module: nn.Module,
    exchange: SampleExchange,
    adapter: BatchAdapter,
    selection: Selection,
    context: AbstractContextManager[Any],
    step: int,
    digest: int = 0,
) -> UnionBatch:
    """Exchange the own batch for the union; a collective.

    Args:
        batch: The user's batch; not changed.
        module: Gives the logits that samples are selected by.
        exchange: Carries the tensors.
        adapter: Tells input and target.
        selection: What is sent.
        context: Context of the forward pass for the selection.
        step: Number of the batch.
        digest: Hash of the own weights.

    Raises:
        UsageError: If the batch of any process does not fit.
    """
    paths: list[tuple[Key, ...]] = []
    size = 0

    def prepare() -> list[Tensor]:
        nonlocal size
        located = adapter.locate(batch)
        tensors = _tensors(batch, located)
        paths.extend(tensors)
        size = len(located.x)
        with context:
            return selection.chosen(module, batch, located, list(tensors.values()), exchange.rank, step)

    union, digests = exchange.gather(prepare, step=step, digest=digest)
    if selection.select == "importance":
        *entries, probabilities = union
        times = repeats(probabilities, selection.seed, "repeats", step)
        rows = torch.arange(len(times)).repeat_interleave(times).to(probabilities.device)
        repeated = _rebuilt(batch, paths, [entry[rows] for entry in entries])
        return UnionBatch(repeated, None, len(rows) / (size * exchange.world_size), digests)
    length = len(union[0]) // exchange.world_size
    first = length * exchange.rank
    own = _rebuilt(batch, paths, [entry[first : first + length] for entry in union])
    return UnionBatch(_rebuilt(batch, paths, union), own, 1.0, digests)


def _tensors(batch: Any, located: Located) -> dict[tuple[Key, ...], Tensor]:
    """Return input, target and all other tensors of a batch by their places."""
    found: dict[tuple[Key, ...], Any] = {located.input_path: located.x, located.target_path: located.y}
    for path, value in leaves(batch):
        if value is not None:
            found.setdefault(path, value)
    for path, value in found.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"the entry {shown(path)!r} of the batch is of type {type(value).__name__}, which cannot be joined "
                "with those of others: let the loader return tensors with one row per sample"
            )
    return found


def _rebuilt(batch: Any, paths: Sequence[tuple[Key, ...]], tensors: Sequence[Tensor]) -> Any:
    for path, tensor in zip(paths, tensors, strict=True):
        batch = replaced(batch, path, tensor)
    return batch
