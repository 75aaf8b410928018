"""What senders and owners remember, as state for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.engine import CommEngine
from robustdist.comm.low_rank import PowerSGD
from robustdist.core.ranks import gathered
from robustdist.errors import UsageError

__all__ = ["RESIDUALS", "Residuals", "load_residuals", "save_residuals"]

_CPU = torch.device("cpu")

Residuals: TypeAlias = Literal["reduced", "per_rank", "reset"]
RESIDUALS: tuple[Residuals, ...] = ("reduced", "per_rank", "reset")


def save_residuals(
    engine: CommEngine, mode: Residuals, sizes: Mapping[str, int], *, device: torch.device = _CPU
) -> dict[str, Any]:
    r"""Return the committed vectors of all ranks: tensors and plain types only, equal on all ranks.

    "reduced" is :math:`r = \frac1n \sum_i e_i + e_{owner}`, one vector of the size of the model. Every rank that starts
    with :math:`e_i = r` delivers the same total correction, whatever the number of ranks. "per_rank" is the vectors of
    every rank, for an exact continuation with the same number. "reset" is nothing.

    A collective of the default group unless "reset": all ranks must call it, between two steps.

    Args:
        engine: The engine, with no bucket on its way.
        mode: Which of the three.
        sizes: Number of elements of every parameter that may have a vector, by name, equal on all ranks.
        device: One on which the default group can communicate.
    """
    common: dict[str, Any] = {"mode": mode, "world_size": engine.world_size}
    if engine.memory is None or mode == "reset":
        return common
    if isinstance(engine.codec, PowerSGD):
        # its factors, with which the next step begins; they are equal on all ranks
        common["codec"] = engine.codec.state_dict()
    if mode == "per_rank":
        own = {
            "memory": engine.memory.state_dict(),
            "owned": {} if engine.owned is None else engine.owned.state_dict()["residual"],
        }
        return {**common, "ranks": gathered(own)}
    state = engine.memory.state_dict()
    owned = {} if engine.owned is None else engine.owned.state_dict()["residual"]
    return {**common, "memory": _reduced(state, owned, sizes, engine.world_size, device)}


def load_residuals(engine: CommEngine, state: Mapping[str, Any], rank: int) -> None:
    """Give an engine what :func:`save_residuals` returned.

    Raises:
        UsageError: If vectors of every rank were saved for another number of ranks, or by another kind of memory.
    """
    if engine.memory is None or state["mode"] == "reset":
        return
    if isinstance(engine.codec, PowerSGD) and "codec" in state:
        engine.codec.load_state_dict(state["codec"])
    if state["mode"] == "reduced":
        engine.memory.load_state_dict(state["memory"])
        return
    if state["world_size"] != engine.world_size:
        raise UsageError(
            f"residuals='per_rank' of {state['world_size']} processes cannot continue with {engine.world_size}: "
            "use the same number, or save with residuals='reduced'"
        )
    own = state["ranks"][rank]
    engine.memory.load_state_dict(own["memory"])
    if engine.owned is not None:
        engine.owned.load_state_dict({"residual": own["owned"]})


def _reduced(
    state: Mapping[str, Mapping[str, Tensor]],
    owned: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    world_size: int,
    device: torch.device,
) -> dict[str, dict[str, Tensor]]:
    """Average the vectors of all ranks, and add what owners keep for all."""
    names = sorted(sizes)
    slots = sorted(state)
    # a rank may lack a vector that the others have: its first gradient was not finite
    present = torch.tensor([[float(name in state[slot]) for name in names] for slot in slots], device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    reduced: dict[str, dict[str, Tensor]] = {}
    for slot, row in zip(slots, present.tolist(), strict=True):
        vectors = reduced[slot] = {}
        for name, anywhere in zip(names, row, strict=True):
            if anywhere:
                own = state[slot].get(name)
                # in float32 whatever the memory stores: rounding once more would lose gradient
                mean = torch.zeros(sizes[name], device=device) if own is None else own.to(device, torch.float32)
                mean.mul_(1 / world_size)
                if slot == slots[0]:
                    for key, error in owned.items():
                        owner_of, _, offset = key.rpartition("@")
                        if owner_of == name:
                            mean[int(offset) : int(offset) + len(error)].add_(error.to(device, torch.float32))
                dist.all_reduce(mean)
                vectors[name] = mean.cpu()
    return reduced
