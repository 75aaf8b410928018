"""Whether all processes still hold the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from robustdist.errors import UsageError

__all__ = ["check_digests", "make_equal", "replica_digest"]


@torch.no_grad()
def make_equal(module: nn.Module) -> None:
    """Give all processes the parameters and buffers of the first one."""
    for tensor in (*module.parameters(), *module.buffers()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, 0)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def replica_digest(module: nn.Module) -> int:
    """Return a hash of the bits of all parameters and buffers, a positive int64."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 1


def check_digests(digests: Sequence[int], step: int) -> None:
    """Compare the hashes of all processes.

    Args:
        digests: One per process.
        step: Number of the batch, for the message.

    Raises:
        UsageError: If they differ, naming the processes, the likely cause and the remedy.
    """
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if not others:
        return
    error = UsageError(
        f"the weights or buffers of process {' and '.join(others)} differ from those of process 0 before batch {step}, "
        "though all took the same batches, so the module, the optimiser or a callback draws or decides by rank, or "
        "kernels of a GPU are not deterministic: make it the same on all ranks, set Trainer(deterministic=True), or "
        "use CompressedDDPStrategy"
    )
    error.shared = True
    raise error
