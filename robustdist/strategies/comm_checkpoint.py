"""What a checkpoint keeps of the communication of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from robustdist._lightning import LightningModule, rank_zero_warn
from robustdist.comm import Identity
from robustdist.comm.engine import CommEngine
from robustdist.comm.residual_state import Change, Residuals, Shapes, load_residuals, map_residuals, save_residuals
from robustdist.errors import RobustDistWarning
from robustdist.strategies.bit_control import BitControl
from robustdist.strategies.bucket_router import BucketRouter
from robustdist.strategies.gradient_route import GradientRoute
from robustdist.strategies.momentum_sync import MomentumSync

__all__ = ["KEY", "change_communication", "communication_state", "restore_communication"]

#: Where it is in the checkpoint.
KEY = "robustdist.communication"


def communication_state(
    engine: CommEngine,
    mode: Residuals,
    module: LightningModule,
    *,
    device: torch.device,
    step: int,
    route: GradientRoute | None,
    bits: BitControl | None,
    momenta: MomentumSync | None,
) -> dict[str, Any]:
    """Return tensors and plain types, equal on all ranks.

    A collective of the default group, unless ``mode`` is "reset" or the training was interrupted: not all ranks have to
    be here then.
    """
    if mode != "reset" and module.trainer.interrupted:
        rank_zero_warn(
            "a checkpoint saved after an exception holds no residuals: error feedback starts anew from it",
            category=RobustDistWarning,
        )
        mode = "reset"
    router = BucketRouter() if route is None else route.router
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    return {
        "step": step,
        "executed": engine.num_steps,
        "buckets": [list(names) for names in router.sent],
        "grouped": router.join,
        "bits": None if bits is None else bits.state_dict(),
        "momenta": None if momenta is None else momenta.state_dict(mode, device),
        **save_residuals(engine, mode, sizes, device=device),
    }


def restore_communication(
    state: Mapping[str, Any],
    engine: CommEngine,
    rank: int,
    *,
    route: GradientRoute | None,
    bits: BitControl | None,
    momenta: MomentumSync | None,
) -> None:
    """Take over what :func:`communication_state` returned."""
    engine.num_steps = state.get("executed", engine.num_steps)
    if bits is not None and state["bits"] is not None:
        bits.load_state_dict(state["bits"])
    load_residuals(engine, state, rank)
    if momenta is not None and state["momenta"] is not None:
        momenta.load_state_dict(state["momenta"], rank)
    if route is not None and not isinstance(engine.codec, Identity):
        # DDP begins with a single bucket and cuts it after the first step. A resumed run has to begin with the cut one,
        # or chunks and draws of its first step would be others than in an uninterrupted run.
        route.restore(BucketRouter([tuple(names) for names in state["buckets"]], join=state["grouped"]))


def change_communication(
    change: Change, engine: CommEngine, momenta: MomentumSync | None, shapes: Shapes, *, device: torch.device
) -> Shapes:
    """Map all that is kept per parameter through ``change``; return the shapes that became others. A collective."""
    changed = map_residuals(engine, change, shapes, device=device)
    return changed if momenta is None else changed | momenta.map_residuals(change, shapes, device)
