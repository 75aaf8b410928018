"""Helpers for tests, ours and those of people who extend robustdist."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["TinyNet", "run_ranks", "toy_images"]


def run_ranks(function: Callable[..., Any], world_size: int = 2, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``function(rank, *args)`` in forked processes joined by a gloo group and return what each returned.

    Forking starts a process in milliseconds, so ``function`` may be a closure. Each process uses one thread.

    Args:
        function: Called in every process; its result must be picklable.
        world_size: Number of processes.
        *args: Further arguments.
        timeout: Seconds after which all processes are ended.

    Raises:
        RuntimeError: With the traceback of the first process that failed, or the exit status of one that died.
        TimeoutError: If the processes did not finish in time.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:

        def worker(rank: int) -> None:
            torch.set_num_threads(1)
            failed = None
            try:
                dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
                outcome = pickle.dumps((failed, function(rank, *args)))
            except BaseException:
                # the others fail after this one, when they miss it in a collective
                failed = time.monotonic()
                outcome = pickle.dumps((failed, traceback.format_exc()))
            Path(folder, f"{rank}.pickle").write_bytes(outcome)
            if failed is None:
                dist.destroy_process_group()

        processes = [context.Process(target=worker, args=(rank,)) for rank in range(world_size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in processes if process.is_alive()]
        for process in hung:
            process.kill()
            process.join()
        outcomes = {
            rank: pickle.loads(path.read_bytes())
            for rank in range(world_size)
            if (path := Path(folder, f"{rank}.pickle")).exists()
        }
    failures = [(failed, rank, value) for rank, (failed, value) in outcomes.items() if failed is not None]
    for rank, process in enumerate(processes):
        if rank not in outcomes and process not in hung:
            failures.append((0.0, rank, f"the process died with exit status {process.exitcode}"))
    if failures:
        _, rank, reason = min(failures)
        raise RuntimeError(f"rank {rank} failed:\n{reason}")
    if hung:
        raise TimeoutError(f"{len(hung)} of {world_size} processes did not finish in {timeout} s")
    return [outcomes[rank][1] for rank in range(world_size)]


def toy_images(num_samples: int, num_classes: int = 4, size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1], shape (num_samples, 1, size, size), whose class shows as a bright corner, and labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, num_classes, (num_samples,), generator=generator)
    x = 0.6 * torch.rand(num_samples, 1, size, size, generator=generator)
    half = size // 2
    for row, label in enumerate(y.tolist()):
        top, left = half * (label // 2 % 2), half * (label % 2)
        x[row, :, top : top + half, left : left + half] += 0.4
    return x, y


class TinyNet(nn.Module):
    """A convolution, optional batch norm and dropout, and a linear layer; a few hundred parameters."""

    def __init__(
        self, num_classes: int = 4, size: int = 6, channels: int = 1, batch_norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * size * size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (batch, channels, size, size) to logits."""
        hidden = self.dropout(torch.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(hidden.flatten(1))
        return logits
