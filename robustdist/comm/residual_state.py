"""What senders and owners remember, as state for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from robustdist.comm.engine import CommEngine
from robustdist.comm.low_rank import PowerSGD
from robustdist.core.ranks import gathered
from robustdist.errors import UsageError

__all__ = [
    "RESIDUALS",
    "Change",
    "Residuals",
    "Shapes",
    "check_residuals",
    "load_residuals",
    "map_residuals",
    "save_residuals",
]

_CPU = torch.device("cpu")

Residuals: TypeAlias = Literal["reduced", "per_rank", "reset"]
#: Takes the name of a parameter and a tensor of its shape, returns what takes its place, or None for nothing.
Change: TypeAlias = Callable[[str, Tensor], Tensor | None]
#: Shapes of parameters by name.
Shapes: TypeAlias = dict[str, tuple[int, ...]]
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


def map_residuals(engine: CommEngine, change: Change, shapes: Shapes, *, device: torch.device = _CPU) -> Shapes:
    """Let a function change what is kept of each parameter, for example cut it as the parameter was cut.

    All ranks go on with the "reduced" form (see :func:`save_residuals`), which adds up what senders and owners keep, so
    nothing is lost but what the function takes away. All ranks call it with the same tensors, in the same order:
    each vector that the memory keeps of a parameter in the shape of the parameter, and for ``PowerSGD`` each row of Q
    as a matrix of equal rows, of which the first row counts. If it returns None once, nothing is kept of the parameter.

    A collective of the default group: all ranks must call it, between two steps.

    Args:
        engine: The engine, with no bucket on its way.
        change: The function.
        shapes: Shapes of all parameters when their gradients were last sent, by name.
        device: One on which the default group can communicate.

    Returns:
        The new shapes of the parameters that something is kept of.
    """
    new: Shapes = {}
    if engine.memory is None:
        return new
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    state = save_residuals(engine, "reduced", sizes, device=device)["memory"]
    names = dict.fromkeys(name for vectors in state.values() for name in vectors)
    mapped: dict[str, dict[str, Tensor]] = {slot: {} for slot in state}
    for name in names:
        kept = {slot: vectors[name].view(shapes[name]) for slot, vectors in state.items() if name in vectors}
        changed = _changed(change, name, list(kept.values()))
        if changed is not None:
            new[name] = tuple(changed[0].shape)
            for slot, vector in zip(kept, changed, strict=True):
                mapped[slot][name] = vector
    engine.memory.load_state_dict(mapped)
    if engine.owned is not None:
        engine.owned.load_state_dict({"residual": {}})
    if isinstance(engine.codec, PowerSGD):
        _map_starts(engine.codec, change, shapes)
    return new


def check_residuals(engine: CommEngine, sizes: Mapping[str, int]) -> None:
    """Forget what is kept of parameters that are no longer there.

    Raises:
        UsageError: If something is kept of a parameter that now has another number of elements.
    """
    if engine.memory is None:
        return
    kept = {name: len(vector) for vectors in engine.memory.state_dict().values() for name, vector in vectors.items()}
    for name, numel in kept.items():
        if name not in sizes:
            engine.memory.drop(name)
        elif sizes[name] != numel:
            raise UsageError(
                f"{name} has {sizes[name]} elements, and what the compressor keeps of it has {numel}: call "
                "map_residuals() before the module is wrapped again, with a function that cuts what is kept as the "
                "parameter was cut"
            )
    if engine.owned is not None:
        for name in kept.keys() - sizes.keys():
            engine.owned.drop_parameter(name)


def _changed(change: Change, name: str, vectors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return what takes the place of vectors of equal shape, or None if one is to be forgotten."""
    changed = []
    for vector in vectors:
        one = change(name, vector)
        if one is None:
            return None
        changed.append(one.detach())
    if len({vector.shape for vector in changed}) > 1:
        raise UsageError(f"the function gave {name} several shapes: it must treat all tensors of a parameter alike")
    return changed


def _map_starts(codec: PowerSGD, change: Change, shapes: Shapes) -> None:
    state = codec.state_dict()
    for name, right in list(state["start"].items()):
        changed = None
        if name in shapes:
            rows, columns, _ = codec.dims(shapes[name])
            changed = _changed(change, name, [row.expand(rows, columns).reshape(shapes[name]) for row in right])
        if changed is None:
            del state["start"][name]
        else:
            state["start"][name] = torch.stack([matrix[0].flatten() for matrix in changed])
    codec.load_state_dict(state)


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
