"""The way of gradients from DDP's buckets to the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from robustdist._lightning import LightningModule, rank_zero_info
from robustdist.comm.cost import Collective
from robustdist.comm.engine import CommEngine
from robustdist.strategies.bucket_router import BucketRouter
from robustdist.strategies.group_planner import start_groups
from robustdist.strategies.used_parameters import UsedParameters

__all__ = ["GradientRoute", "Groups", "tell_of_end", "tell_of_switch"]

Groups: TypeAlias = Literal["ddp", "auto"] | Sequence[Sequence[str]]


class GradientRoute:
    """Which gradients travel together, and which of them took part in the step.

    While the engine averages float32, they stay in DDP's own buckets: these are then averaged as DDP would, bit for
    bit. Groups are planned from steps that go through the codec.

    Args:
        groups: "ddp", "auto", or lists of names; a collective for "auto".
        engine: Where they go.
        module: The module; what is watched of it is left alone after :meth:`close`.
        device: Where its gradients are.
        dynamic: Whether to note which parameters took part.

    Attributes:
        router: What made the groups of the last step.
    """

    def __init__(
        self, groups: Groups, engine: CommEngine, module: LightningModule, device: torch.device, *, dynamic: bool
    ) -> None:
        self._engine = engine
        self._grouped, self._planner = start_groups(groups, engine, module, device)
        self._plain = BucketRouter()
        self.router = self._grouped
        self._used = UsedParameters(module) if dynamic else None

    def send(
        self, grads: Mapping[str, Tensor], buffer: Tensor, *, step: int, note: Sequence[float], first: bool, last: bool
    ) -> torch.futures.Future[Tensor]:
        """Hand a bucket of DDP to the engine.

        Args:
            grads: Gradients by name, views of ``buffer``.
            buffer: What the future gives.
            step: Number of the synchronised step.
            note: As in :meth:`robustdist.comm.engine.CommEngine.submit`.
            first: Whether the bucket is the first one of the step.
            last: Whether it is the last one.
        """
        if first:
            self.router = self._plain if self._engine.dense else self._grouped
        used: Collection[str] | None = None if self._used is None else self._used.since_last_sync

        def submit(part: dict[str, Tensor], buffer: Tensor) -> torch.futures.Future[Tensor]:
            return self._engine.submit(part, buffer, step=step, note=note, used=used)

        future = self.router.route(grads, buffer, submit, is_first=first, is_last=last)
        if last and self._used is not None:
            self._used.clear()
        return future

    def begin_backward(self) -> None:
        """Start the clock of the planner."""
        if self._planner is not None:
            self._planner.begin_backward()

    def end_step(self, collective: Collective | Literal["auto"]) -> None:
        """See an executed step; all ranks must call it, since it may lead to a plan."""
        if self._planner is None or self.router is not self._grouped:
            return
        groups = self._planner.end_step(self._engine, collective)
        if groups is not None:
            self._planner, self._grouped = None, BucketRouter([group.names for group in groups], join=True)

    def restore(self, router: BucketRouter) -> None:
        """Go on with the groups of a checkpoint: a plan, or DDP's buckets unless other groups were given."""
        if router.join or not self._grouped.join:
            self.router = self._grouped = router
        if router.join and self._planner is not None:
            self._planner.close()
            self._planner = None

    def close(self) -> None:
        """Stop to watch the module."""
        for watcher in (self._planner, self._used):
            if watcher is not None:
                watcher.close()
        self._planner = self._used = None


def tell_of_switch(engine: CommEngine, dense: bool) -> None:
    """Say that the codec sets in, if the step that has just been counted was the last one without it.

    Args:
        engine: The engine.
        dense: Whether the step was one without it.
    """
    if dense and not engine.dense and engine.world_size > 1:
        rank_zero_info(f"warmup_steps={engine.warmup_steps}: done, gradients now travel as {engine.codec!r}")


def tell_of_end(engine: CommEngine) -> None:
    """Say that a training has ended before the codec set in."""
    if engine.dense and engine.world_size > 1:
        rank_zero_info(
            f"warmup_steps={engine.warmup_steps}: nothing was compressed, training ended at {engine.num_steps}"
        )
