"""What compressed communication cannot be combined with, found before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from robustdist._lightning import Callback, GradientAccumulationScheduler, LightningModule, Trainer, rank_zero_warn
from robustdist.comm import Compressor
from robustdist.comm.cost import Collective, choose
from robustdist.comm.overrides import check_overrides
from robustdist.comm.reduction import check_warmup
from robustdist.comm.residual_state import RESIDUALS
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.optim import OneBitAdam
from robustdist.types import check_count

__all__ = [
    "check_codec",
    "check_groups",
    "check_module",
    "check_optimizers",
    "check_options",
    "check_skipped",
    "check_trainer",
    "check_warmup_of",
    "check_wrapped",
    "warn_of_gradient",
]

#: Steps that a gradient scaler may skip one after the other; it finds its scale in some twenty.
_MAX_SKIPPED = 100

_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def check_options(
    options: Mapping[str, Any], *, residuals: str, small: int, segment: int | None, warmup_steps: int
) -> None:
    """Refuse values out of range, and options of DDPStrategy that would put another hook in the place of ours.

    Raises:
        UsageError: Naming the option, or both.
    """
    if residuals not in RESIDUALS:
        raise UsageError(f"residuals={residuals!r} must be one of {', '.join(RESIDUALS)}")
    check_count(small, "small")
    if segment is not None:
        check_count(segment, "segment")
    check_warmup(warmup_steps)
    for name in _HOOKS:
        if options.get(name) is not None:
            raise UsageError(
                f"compressor and {name} exclude each other, since DDP has one communication hook: "
                f"leave out {name}, or use Lightning's DDPStrategy"
            )


def check_codec(codec: Compressor, *, collective: Collective | Literal["auto"], sides: int) -> None:
    """Refuse a codec that cannot be used, or not with this collective.

    Raises:
        UsageError: Naming the codec.
    """
    check_overrides(codec)
    choose(codec, 1, 2, collective, sides)


def check_trainer(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Refuse static_graph together with accumulation.

    Raises:
        UsageError: Naming both options.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedulers = [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]
    accumulates = trainer.accumulate_grad_batches > 1 or any(
        factor > 1 for scheduler in schedulers for factor in scheduler.scheduling.values()
    )
    if options.get("static_graph") and accumulates:
        raise UsageError(
            "static_graph=True and accumulate_grad_batches > 1 exclude each other with a compressor, since a static "
            "graph is synchronised in every backward pass: leave out static_graph"
        )


def check_module(module: LightningModule) -> None:
    """Refuse gradients that codecs do not take.

    Raises:
        UsageError: Naming the layer and the option.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise UsageError(
                f"{name} is a {type(layer).__name__} with sparse=True, and compressor takes dense gradients: "
                "set sparse=False, or use Lightning's DDPStrategy"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise UsageError(
                f"{name} is complex, and compressor takes real gradients: keep torch.view_as_real of it as the "
                "parameter, or use Lightning's DDPStrategy"
            )
        if getattr(parameter, "_in_backward_optimizers", None):
            raise UsageError(
                f"{name} is updated by an optimiser during backward, which excludes a compressor: "
                "let the Trainer step the optimiser"
            )


def check_optimizers(optimizers: Sequence[Optimizer], world_size: int) -> None:
    """Refuse optimisers that decide on backward passes from the loss of their own process.

    Raises:
        UsageError: Naming the optimiser.
    """
    if world_size > 1 and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise UsageError(
            "LBFGS and a compressor exclude each other on several processes, each of which decides from its own loss "
            "on the number of its backward passes: use another optimiser, or a single process"
        )


def check_warmup_of(optimizers: Sequence[Optimizer], warmup_steps: int) -> None:
    """Refuse a warm-up in float32 that is longer than the one of OneBitAdam, which sends momenta in one bit afterwards.

    Raises:
        UsageError: Naming both numbers.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, OneBitAdam):
            limit = next((step for step in range(warmup_steps) if not optimizer.wants_gradient_sync(step)), None)
            if limit is not None:
                raise UsageError(
                    f"warmup_steps={warmup_steps} exceeds the {limit} steps in which OneBitAdam averages gradients: "
                    f"give warmup_steps={limit} or less, or raise its freeze_step"
                    + (" and kappa" if optimizer.variance == "zero_one" else "")
                )


def check_groups(groups: Sequence[Sequence[str]], module: LightningModule) -> None:
    """Refuse groups of unknown names, or with a name in two of them.

    Raises:
        UsageError: Naming the first of them.
    """
    names = [name for group in groups for name in group]
    known = {name for name, _ in module.named_parameters()}
    wrong = [name for name in names if name not in known or names.count(name) > 1]
    if wrong:
        what = "is in two groups" if wrong[0] in known else "is no parameter of the module"
        raise UsageError(f"groups: {wrong[0]!r} {what}: give each name of named_parameters() once")


def check_wrapped(model: DistributedDataParallel) -> None:
    """Refuse torch's reducer in Python, which gives hooks no buckets.

    Raises:
        UsageError: Naming both options.
    """
    if getattr(model, "_use_python_reducer", False):
        raise UsageError(
            "torch._dynamo.config.optimize_ddp='python_reducer' and compressor exclude each other: "
            "set optimize_ddp to True"
        )


def check_skipped(skipped: int, module: LightningModule, loss_scale: float) -> None:
    """Stop a training in which a gradient scaler skips every step.

    Args:
        skipped: Steps skipped one after the other.
        module: The module with the gradients of the last one.
        loss_scale: Present factor of the scaler.

    Raises:
        RuntimeError: Naming the first parameter whose gradient is not finite.
    """
    if skipped < _MAX_SKIPPED:
        return
    gradients = ((name, parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None)
    name = next((name for name, grad in gradients if not bool(torch.isfinite(grad).all())), None)
    raise RuntimeError(
        f"{skipped} optimiser steps in a row were skipped, at loss scale {loss_scale:g}: the gradient of "
        f"{name or 'a parameter'} is not finite; lower the learning rate, or train in precision bf16-mixed or 32"
    )


def warn_of_gradient(name: str) -> None:
    """Say that a gradient is not finite."""
    rank_zero_warn(
        f"the gradient of {name} is not finite on some process; it reaches the optimiser as it is, and the residuals "
        "keep their values",
        category=RobustDistWarning,
    )
