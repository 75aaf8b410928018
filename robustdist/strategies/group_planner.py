"""Groups of gradients for a module, planned from what its first backward passes and the link took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from robustdist._lightning import LightningModule, rank_zero_info
from robustdist.comm import Identity
from robustdist.comm.cost import Collective, choose, sent_bytes
from robustdist.comm.engine import CommEngine
from robustdist.comm.grouping import Cost, Group, Profile, plan_groups
from robustdist.comm.link import Link, measure_link
from robustdist.strategies.bucket_router import BucketRouter
from robustdist.strategies.refusals import check_groups

__all__ = ["GroupPlanner", "start_groups"]

#: Backward passes that are watched; those before are slower, since buffers are made and buckets are cut.
_SKIPPED, _WATCHED = 2, 3


class GroupPlanner:
    """Watches when gradients become ready in some synchronised steps, then plans groups.

    Args:
        module: The module; its parameters that take gradients are watched, through hooks that :meth:`close` removes.
        link: The link between the ranks.
        device: One on which the default group can communicate.
    """

    def __init__(self, module: nn.Module, link: Link, device: torch.device) -> None:
        self._link, self._device = link, device
        self._numels = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
        self._begin: float | None = None
        self._ready: dict[str, float] = {}
        self._sums = dict.fromkeys(self._numels, 0.0)
        self._num_steps = 0
        self._skipped = (0.0, 0)
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def begin_backward(self) -> None:
        """Start the clock; of accumulated batches the last one counts."""
        self._begin = perf_counter()
        self._ready = {}

    def end_step(self, engine: CommEngine, collective: Collective | Literal["auto"]) -> list[Group] | None:
        """Count a synchronised step; return the plan once enough were seen.

        A collective of the default group in that step: all ranks must call it, between two steps.
        """
        self._num_steps += 1
        stats = engine.stats
        if self._num_steps == _SKIPPED:
            self._skipped = stats.codec_seconds, stats.steps
        if self._num_steps > _SKIPPED:
            for name in self._sums:
                self._sums[name] += self._ready.get(name, 0.0)
        if self._num_steps < _SKIPPED + _WATCHED:
            return None
        self.close()
        codec_seconds, steps = stats.codec_seconds - self._skipped[0], stats.steps - self._skipped[1]
        handled = 4 * sum(self._numels.values()) * max(steps, 1)
        own = [*(seconds / _WATCHED for seconds in self._sums.values()), codec_seconds / handled]
        means = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(means)
        *ready, codec = (means / dist.get_world_size()).tolist()
        num_bytes = {name: 4 * numel for name, numel in self._numels.items()}
        profile = Profile.of_parameters(dict(zip(self._numels, ready, strict=True)), num_bytes)
        groups = plan_groups(profile, self._cost(engine, collective, codec))
        waits = sum(group.exposed for group in groups)
        sizes = ", ".join(f"{group.num_bytes / 2**20:.1f}" for group in groups)
        rank_zero_info(f"groups='auto': {len(groups)} of {sizes} MiB; {1000 * waits:.0f} ms of waiting predicted")
        return groups

    def close(self) -> None:
        """Stop to watch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _cost(self, engine: CommEngine, collective: Collective | Literal["auto"], codec_seconds: float) -> Cost:
        numel, codec = sum(self._numels.values()), engine.codec
        kind = choose(codec, numel, engine.world_size, collective, engine.sides)
        ratio = sent_bytes(codec, numel, engine.world_size, kind, engine.sides) / (4 * numel)
        # one after the other: those of the codec, and the all-reduce of the small parameters
        messages = 3 if kind == "chunked" else 2
        bandwidth = self._link.payload_bandwidth or self._link.bandwidth
        return Cost(messages * self._link.latency, bandwidth, codec_seconds, ratio)

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if self._begin is not None:
                self._ready[name] = perf_counter() - self._begin

        return note


def start_groups(
    groups: Literal["ddp", "auto"] | Sequence[Sequence[str]],
    engine: CommEngine,
    module: LightningModule,
    device: torch.device,
) -> tuple[BucketRouter, GroupPlanner | None]:
    """Return what makes the groups at first, and what plans others; a collective for "auto"."""
    if groups == "ddp" or engine.world_size == 1:
        return BucketRouter(), None
    if isinstance(engine.codec, Identity):
        rank_zero_info("groups: float32 travels in DDP's own buckets, so nothing is grouped")
        return BucketRouter(), None
    if groups == "auto":
        return BucketRouter(), GroupPlanner(module, measure_link(device=device), device)
    check_groups(groups, module)
    return BucketRouter([tuple(names) for names in groups], join=True), None
