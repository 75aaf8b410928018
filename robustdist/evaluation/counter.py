"""From the batches of loaders to a tally: which rows this process counts, and under which ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.batch import BatchAdapter
from robustdist.core.forward import Forward
from robustdist.core.sharding import Shard, fingerprint, flatten_loaders, shard_of
from robustdist.core.space import Pixels, Space, View
from robustdist.evaluation.tally import RobustTally

__all__ = ["BatchCounter"]

Watch = Callable[[Callable[[Tensor], Any], Tensor, Tensor, Sequence[int | None], int, bool], None]


class BatchCounter:
    """Feeds the batches of one evaluation loop to a tally.

    Args:
        tally: Counts.
        loaders: A loader, or a list or mapping of them.
        rank: This process.
        world_size: Number of processes.
        gather: Returns the value of every process; all of them enter.
        adapter: Finds input and target in a batch.
        forward: Which function of a module gives the logits.
        max_samples: Count only the first samples of each data set; None for all.
        space: What is attacked; default the pixels of the batch.

    Attributes:
        uncertain: Whether padded samples could not be told from real ones.
        watch: Called after each batch with forward, inputs, labels, ids, loader and whether the batch is a whole.
        dtype: Number format of the inputs.
    """

    def __init__(
        self,
        tally: RobustTally,
        loaders: Any,
        *,
        rank: int,
        world_size: int,
        gather: Callable[[Any], list[Any]],
        adapter: BatchAdapter,
        forward: Forward,
        max_samples: int | None = None,
        space: Space | None = None,
    ) -> None:
        self.tally = tally
        self.adapter = adapter
        self.forward = forward
        self.max_samples = max_samples
        self.space = space if space is not None else Pixels()
        self.uncertain = False
        self.watch: Watch | None = None
        self.dtype = torch.float32
        self.shards = shards_of(loaders, rank, world_size, gather)
        self._places: dict[int, int] = {}
        self._batch: Any = None

    def keep(self, batch: Any) -> None:
        """Keep a batch as it is before the user's step, which may take it apart or write into it."""
        self._batch = self.space.kept(batch, self.adapter)

    def count(self, module: nn.Module, loader: int, context: AbstractContextManager[None]) -> None:
        """Attack the batch that was kept and count it.

        Args:
            module: The module to judge.
            loader: Place of the loader that the batch is from.
            context: Entered for all forward passes.
        """
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        with context:
            self._count(module, loader, self.space.view(module, batch, self.adapter, self.forward))

    def _count(self, module: nn.Module, loader: int, view: View) -> None:
        x, y = view.x, view.y
        shard = self.shards[loader]
        # several loaders at once: which of them hands out this input cannot be told
        combined = len(self.shards) > 1 and len(view.path) > 1
        if combined or not shard.exact:
            self.tally.mark_uncertain()
            self.uncertain = True
        start = self._places.get(loader, 0)
        self._places[loader] = start + len(x)
        ids = shard.sample_ids(start, len(x))
        if self.max_samples is not None:
            ids = [None if sample_id is None or sample_id >= self.max_samples else sample_id for sample_id in ids]
        counted = [row for row, sample_id in enumerate(ids) if sample_id is not None]
        if not counted:
            return
        if view.rowwise and len(counted) < len(x):
            x, y, ids = x[counted], y[counted], [ids[row] for row in counted]
        self.tally.update(module, view, x, y, ids, loader=loader, whole_batch=not view.rowwise)
        self.dtype = x.dtype
        if self.watch is not None:
            self.watch(view, x, y, ids, loader, not view.rowwise)


def shards_of(loaders: Any, rank: int, world_size: int, gather: Callable[[Any], list[Any]]) -> list[Shard]:
    """Return how each loader spreads its data set over the processes; a collective."""
    flat: Sequence[Any] = flatten_loaders(loaders)
    shards = [shard_of(loader, rank, world_size) for loader in flat]
    shared = [place for place, shard in enumerate(shards) if shard.keep_every > 1]
    if shared:
        # every process walks through a whole data set: is it the same one, or the share of each?
        everyone = gather([fingerprint(flat[place]) for place in shared])
        for place, prints in zip(shared, zip(*everyone, strict=True), strict=True):
            if len(set(prints)) > 1:
                shards[place] = Shard(world_size, rank, exact=False)
    return shards
