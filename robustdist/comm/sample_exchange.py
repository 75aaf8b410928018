"""Every rank gets the batches of all ranks, as packed codes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.collectives import all_gather
from robustdist.comm.engine import RankError
from robustdist.comm.samples import SamplePayload, SampleQuantizer
from robustdist.core.ranks import gathered
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError

__all__ = ["HEADER_BYTES", "Joined", "SampleExchange"]

#: Whether the rank failed, a hash of what its batch looks like, and one of its weights: three int64.
HEADER_BYTES = 24


class Joined(NamedTuple):
    """The batches of all ranks in the order of ranks, and the hash of each rank's weights."""

    tensors: tuple[Tensor, ...]
    digests: tuple[int, ...]


class SampleExchange:
    """Gathers batches through a :class:`SampleQuantizer`; all ranks, the sender too, decode the same bytes.

    Before the batches the ranks exchange a few words: whether all of them have a batch and whether these are alike, so
    that one rank's fault ends all of them with its text and none waits for a length that never comes.

    Collectives of the default group; without one there is a single rank, which meets its own codes.

    Args:
        quantizer: What the batches travel through; the same settings on all ranks.
        device: Where the collectives of the group take tensors.

    Attributes:
        calls: Exchanges since the start.
        bytes_sent: Bytes that this rank sent to others: n - 1 times the head and the payload.
        seconds: Time spent.
    """

    def __init__(self, quantizer: SampleQuantizer, device: torch.device | str = "cpu") -> None:
        self.quantizer, self.device = quantizer, torch.device(device)
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.calls = self.bytes_sent = 0
        self.seconds = 0.0

    def gather(self, prepare: Callable[[], Sequence[Tensor]], *, step: int, digest: int = 0) -> Joined:
        """Return the union of the batches of all ranks.

        Args:
            prepare: Returns input, target and all other tensors of the own batch, one row per sample each; what it
                raises is raised on all ranks.
            step: Number of the batch, part of the key of the draws.
            digest: Hash of the own weights; those of all ranks are returned.

        Raises:
            UsageError: If the batches differ in anything but their values, or a rank raised one.
            RankError: If a rank raised anything else.
        """
        begin = perf_counter()
        failure: Exception | None = None
        try:
            tensors = prepare()
            payload = self._compress(tensors, step)
            looks = f"{', '.join(map(str, payload.entries))} by {self.quantizer!r}"
        except Exception as error:  # told to all ranks below
            failure, looks = error, ""
        heads = self._heads(bool(failure), derive_seed(looks), digest)
        if any(failed for failed, _, _ in heads):
            self._raise_failure(failure)
        if len({look for _, look, _ in heads}) > 1:
            told = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(gathered(looks)))
            raise UsageError(
                "the processes have unlike batches or settings, which no exchange of samples can join: give all the "
                f"same batch size and options, for example with drop_last=True ({told})"
            )
        union = self._exchange(payload)
        self.calls += 1
        self.seconds += perf_counter() - begin
        return Joined(union, tuple(digest for _, _, digest in heads))

    def _compress(self, tensors: Sequence[Tensor], step: int) -> SamplePayload:
        for tensor in tensors:
            if tensor.shape[:1] != tensors[0].shape[:1]:
                raise UsageError(
                    f"an entry of the batch has shape {tuple(tensor.shape)} and the input {tuple(tensors[0].shape)}: "
                    "let the loader return tensors with one row per sample, so that batches can be joined"
                )
        return self.quantizer.compress(*tensors, rank=self.rank, step=step)

    def _heads(self, failed: bool, look: int, digest: int) -> list[tuple[int, int, int]]:
        own = (int(failed), look, digest)
        if self.world_size == 1:
            return [own]
        head = torch.tensor(own, device=self.device)
        heads = torch.empty(self.world_size * len(own), dtype=torch.int64, device=self.device)
        all_gather(heads, head, _world()).wait()
        self.bytes_sent += (self.world_size - 1) * HEADER_BYTES
        return [(int(row[0]), int(row[1]), int(row[2])) for row in heads.view(self.world_size, -1).tolist()]

    def _exchange(self, payload: SamplePayload) -> tuple[Tensor, ...]:
        if self.world_size == 1:
            return self.quantizer.decompress(payload)
        size = payload.num_bytes
        codes = torch.empty(self.world_size * size, dtype=torch.uint8, device=payload.data.device)
        all_gather(codes, payload.data, _world()).wait()
        self.bytes_sent += (self.world_size - 1) * size
        batches = [self.quantizer.decompress(SamplePayload(part, payload.entries)) for part in torch.split(codes, size)]
        return tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))

    def _raise_failure(self, failure: Exception | None) -> NoReturn:
        """Exchange texts and raise them: a wrong use by its sentence, anything else with its traceback."""
        usage = isinstance(failure, UsageError)
        text = None if failure is None else str(failure) if usage else "".join(traceback.format_exception(failure))
        told = [(rank, *one) for rank, one in enumerate(gathered((text, usage))) if one[0] is not None]
        if all(is_usage for *_, is_usage in told):
            error = UsageError(f"{told[0][1]} (process {told[0][0]})" if len(told) < self.world_size else told[0][1])
            error.shared = True
            raise error from failure
        raise RankError("\n".join(f"process {rank} failed: {text}" for rank, text, _ in told)) from failure


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
