"""Keep the images of a fixed subset while an evaluation walks through its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.attacks.base import Attack
from robustdist.diagnostics.subset import Part, Subset
from robustdist.diagnostics.threat import compared
from robustdist.evaluation.records import Records

__all__ = ["Collector"]


class Collector:
    """Chooses images by their place in the data, spread evenly, so that any number of processes choose the same.

    Args:
        lengths: Images of each data set; None if unknown, then the first images are taken.
        max_samples: The evaluation takes only the first images of each data set; None for all.
        wanted: Number of images to keep.
    """

    def __init__(self, lengths: Sequence[int | None], max_samples: int | None, wanted: int) -> None:
        self.wanted = wanted
        self.stride = 1
        self.starts = [0] * len(lengths)
        known = [length for length in lengths if length is not None]
        if len(known) == len(lengths):
            counted = [length if max_samples is None else min(length, max_samples) for length in known]
            self.starts = [sum(counted[:place]) for place in range(len(counted))]
            self.stride = max(1, sum(counted) // wanted)
        self.batch_size = 1
        self._parts: list[tuple[Callable[[Tensor], Any], Tensor, Tensor, list[tuple[int, int]], Tensor, bool]] = []

    def wants(self, loader: int, sample_id: int | None) -> bool:
        """Return whether an image belongs to the subset."""
        if sample_id is None:
            return False
        place = self.starts[loader] + sample_id
        return place % self.stride == 0 and place // self.stride < self.wanted

    def keep(
        self,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Tensor,
        sample_ids: Sequence[int | None],
        loader: int,
        whole: bool,
    ) -> None:
        """Keep the wanted images of a batch; with ``whole`` the batch around them too."""
        self.batch_size = max(self.batch_size, len(x))
        own = torch.tensor([self.wants(loader, sample_id) for sample_id in sample_ids], dtype=torch.bool)
        if not own.any():
            return
        keys = [(loader, -1 if sample_id is None else sample_id) for sample_id in sample_ids]
        if not whole:
            rows = own.nonzero()[:, 0]
            x, y = x[rows.to(x.device)], y[rows.to(x.device)]
            keys, own = [keys[row] for row in rows.tolist()], own[rows]
        self._parts.append((forward, x.detach().clone(), y.clone(), keys, own, whole))

    def subset(
        self,
        module: nn.Module,
        records: Records,
        attacks: Mapping[str, Attack],
        rank: int,
        world_size: int,
        gather: Callable[[Any], list[Any]],
    ) -> Subset:
        """Return what this process examines; a collective.

        All processes get all images, so that a substitute learns the same everywhere, and judge every
        ``world_size``-th. Only batches that must stay whole remain where they are.

        Args:
            module: The module to judge.
            records: The finished records of all processes.
            attacks: The attacks of the evaluation.
            rank: This process.
            world_size: Number of processes.
            gather: Returns the value of every process.
        """
        held = records.robust_under(compared(attacks))
        robust = dict(zip(map(tuple, records.table[:, :2].tolist()), held.tolist(), strict=True))
        device = next((x.device for _, x, *_ in self._parts), torch.device("cpu"))
        mine = [(keys, x.cpu(), y.cpu()) for _, x, y, keys, _, whole in self._parts if not whole]
        images = {
            key: (image, label)
            for parts in gather(mine)
            for keys, x, y in parts
            for key, image, label in zip(keys, x, y, strict=True)
        }
        parts = [
            Part(
                forward=forward,
                x=x,
                y=y,
                ids=[key[1] for key in keys],
                held=torch.tensor([robust.get(key, False) for key in keys]),
                own=own,
                whole=True,
            )
            for forward, x, y, keys, own, whole in self._parts
            if whole
        ]
        forward = next((forward for forward, *_, whole in self._parts if not whole), module)
        if images:
            keys = sorted(images)
            parts.append(
                Part(
                    forward=forward,
                    x=torch.stack([images[key][0] for key in keys]).to(device),
                    y=torch.stack([images[key][1] for key in keys]).to(device),
                    ids=[key[1] for key in keys],
                    held=torch.tensor([robust[key] for key in keys]),
                    own=torch.arange(len(keys)) % world_size == rank,
                )
            )
        return Subset(module, parts, self.batch_size)
