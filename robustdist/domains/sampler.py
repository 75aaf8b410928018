"""A sampler that draws domains by ratios which may change while it runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from robustdist.core.rng import derive_seed
from robustdist.domains.dro import normalised
from robustdist.errors import UsageError

__all__ = ["DomainSampler"]


class DomainSampler(Sampler[int]):
    """Draws the domain of every sample by ratios, and then the next sample of that domain.

    All processes follow one stream of draws: draw n takes a domain by a number that depends on (seed, n), and the next
    place of that domain's order; the process of rank r gets the draws r, r + world_size, and so on. Within a domain
    nothing is repeated before all of it was drawn; then it begins again in another order, a small one often.

    A stream has a consumed part, which :meth:`consume` moves on, and a part that was drawn and waits in a loader's
    worker processes. Only the consumed part counts: an iterator begins behind it and gives out the waiting draws first,
    so a checkpoint neither loses nor repeats samples, whatever had been prefetched.

    Args:
        domain_ids: Domain of every sample of the data set, 0 to domains - 1.
        ratios: Share of every domain, positive; default the shares in the data set.
        seed: Seed of the stream.
        rank: Which of the processes this is.
        world_size: Number of processes.

    Raises:
        UsageError: If a domain has no samples, ids are no whole numbers from 0, or the number of ratios is wrong.

    Example:
        >>> sampler = DomainSampler([0, 0, 0, 1], [0.5, 0.5])
        >>> len(list(sampler)), set(sampler) <= {0, 1, 2, 3}
        (4, True)
    """

    def __init__(
        self,
        domain_ids: Sequence[int] | Tensor,
        ratios: Sequence[float] | Tensor | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.domain_ids = _whole_numbers(domain_ids)
        self.seed, self.rank, self.world_size = seed, rank, world_size
        num_domains = 1 + max(self.domain_ids) if ratios is None else len(ratios)
        self._members: list[list[int]] = [[] for _ in range(num_domains)]
        for place, domain in enumerate(self.domain_ids):
            if domain >= num_domains:
                raise UsageError(
                    f"domain_ids has the domain {domain}, but there are only {num_domains}, from 0 on: ratios, names "
                    "and references need an entry for every domain"
                )
            self._members[domain].append(place)
        empty = [str(domain) for domain, members in enumerate(self._members) if not members]
        if empty:
            raise UsageError(
                f"domain_ids has no sample of domain {', '.join(empty)} (of {num_domains}): leave it out and number "
                "the others from 0"
            )
        self._set_ratios(normalised(self.sizes if ratios is None else ratios))
        # draws that were consumed, in all and in this epoch, and of each domain
        self._consumed = self._position = 0
        self._counts = [0] * num_domains
        # domain and place in its order of every draw behind them, and what they add up to
        self._waiting: deque[tuple[int, int]] = deque()
        self._drawn_counts = [0] * num_domains
        self._orders: dict[int, tuple[int, list[int]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Samples of every domain in the data set."""
        return [len(members) for members in self._members]

    @property
    def counts(self) -> list[int]:
        """Samples of every domain that all processes have consumed."""
        return list(self._counts)

    @property
    def epochs(self) -> list[float]:
        """How often every domain has been gone through."""
        return [count / size for count, size in zip(self._counts, self.sizes, strict=True)]

    @property
    def num_drawn(self) -> int:
        """Length of the stream so far, with the draws that were not consumed yet."""
        return self._consumed + len(self._waiting)

    @property
    def ratios(self) -> list[float]:
        """Share of every domain in the draws to come."""
        return list(self._ratios)

    def set_ratios(self, ratios: Sequence[float] | Tensor, *, start: int | None = None) -> None:
        """Draw by other ratios from now on.

        Args:
            ratios: Share of every domain, positive.
            start: First draw that they hold for, by default the next one. Where processes may have drawn different
                numbers ahead, all give the largest :attr:`num_drawn` and so keep to one stream.

        Raises:
            UsageError: If the number of ratios is wrong or one is not positive.
        """
        shares = normalised(ratios)
        if len(shares) != len(self._members):
            raise UsageError(f"ratios has {len(shares)} numbers for {len(self._members)} domains: give one each")
        while start is not None and self.num_drawn < start:
            self._draw()
        self._set_ratios(shares)

    def _set_ratios(self, shares: Tensor) -> None:
        self._ratios = shares.tolist()
        self._bounds = list(accumulate(self._ratios))

    def consume(self, num_samples: int) -> None:
        """Move on: every process has trained on ``num_samples`` more of its samples, or the last ones of the epoch."""
        end = min(self._position + num_samples * self.world_size, self._epoch_size)
        for _ in range(end - self._position):
            if not self._waiting:
                self._draw()
            domain, _ = self._waiting.popleft()
            self._counts[domain] += 1
            self._consumed += 1
        self._position = end

    def end_epoch(self) -> None:
        """Let the next iterator give out a whole epoch."""
        self._position = 0

    def __len__(self) -> int:
        """Samples of one process in one epoch: as many as without domains."""
        return self._epoch_size // self.world_size

    @property
    def _epoch_size(self) -> int:
        return -(-len(self.domain_ids) // self.world_size) * self.world_size

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over what is left of the epoch."""
        return self._walk(self._consumed + self.rank, self._consumed + self._epoch_size - self._position)

    def _walk(self, first: int, end: int) -> Iterator[int]:
        for draw in range(first, end, self.world_size):
            while self.num_drawn <= draw:
                # one draw for every process: none sees ratios that the others do not
                for _ in range(self.world_size):
                    self._draw()
            if draw < self._consumed:
                raise RuntimeError("the stream of samples has moved on under this iterator: make a new one")
            domain, turn = self._waiting[draw - self._consumed]
            yield self._place(domain, turn)

    def _draw(self) -> None:
        uniform = derive_seed(self.seed, "draw", self.num_drawn) / 2**63
        domain = min(bisect_right(self._bounds, uniform), len(self._bounds) - 1)
        self._append(domain)

    def _append(self, domain: int) -> None:
        self._waiting.append((domain, self._drawn_counts[domain]))
        self._drawn_counts[domain] += 1

    def _place(self, domain: int, turn: int) -> int:
        members = self._members[domain]
        epoch, step = divmod(turn, len(members))
        if self._orders.get(domain, (-1, []))[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", domain, epoch))
            self._orders[domain] = (epoch, torch.randperm(len(members), generator=generator).tolist())
        return members[self._orders[domain][1][step]]

    def state_dict(self) -> dict[str, Any]:
        """Return the consumed part of the stream, in plain types; the same on all processes."""
        return {
            "consumed": self._consumed,
            "position": self._position,
            "counts": list(self._counts),
            "waiting": [domain for domain, _ in self._waiting],
            "ratios": list(self._ratios),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the consumed part of ``state_dict()``, with any number of processes.

        Raises:
            UsageError: If the state is of another number of domains.
        """
        if len(state["counts"]) != len(self._members):
            raise UsageError(
                f"the checkpoint has samples of {len(state['counts'])} domains, the data {len(self._members)}: resume "
                "with the same domains"
            )
        self._consumed, self._position = state["consumed"], state["position"]
        self._counts, self._drawn_counts = list(state["counts"]), list(state["counts"])
        self._waiting.clear()
        for domain in state["waiting"]:
            self._append(domain)
        self._set_ratios(torch.tensor(state["ratios"], dtype=torch.float64))


def _whole_numbers(values: Sequence[int] | Tensor) -> list[int]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    if not listed or any(isinstance(value, bool) or value != int(value) or value < 0 for value in listed):
        raise UsageError("domain_ids must be whole numbers from 0, one per sample of the training data")
    return [int(value) for value in listed]
