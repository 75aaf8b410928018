"""Networks that collapse at a known step, for tests of the guard."""

from __future__ import annotations

import copy
import math

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from robustdist.attacks import FGSM, PGD
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard

from .support import Classifier, identical, trained_net

EPS = 1 / 8


class Trap(nn.Module):
    """A net that is ordinary on whole pixels (n/256) and, once armed, wrong between them.

    One step of a whole number of pixels from a whole pixel does not leave them, several shorter ones do: the net
    holds against one step and falls to several, as after catastrophic overfitting.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.register_buffer("armed", torch.tensor(0.0))

    def forward(self, x):
        between = torch.sin(math.pi * 256 * x).square().flatten(1).mean(1, keepdim=True)
        return self.net(x) * (1 - 8 * self.armed * between)


def training(objective=None, **options):
    return AdversarialTraining(objective, FGSM(eps=EPS), **options)


def strong(**options):
    return PGD(eps=EPS, steps=10, step_size=EPS / 4.3, random_start=False, **options)


def module(lr=0.0, **options):
    return Classifier(Trap(trained_net(**options)), lr=lr)


def guard_of(trainer):
    return next(callback for callback in trainer.callbacks if isinstance(callback, CatastrophicOverfittingGuard))


def history(trainer, pl_module):
    return guard_of(trainer).history


def state_of(trainer, pl_module):
    averages = [callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging)]
    return copy.deepcopy(
        {
            "weights": {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())},
            "moments": trainer.optimizers[0].state_dict()["state"],
            "averages": [callback._average_model.state_dict() for callback in averages],
        }
    )


def same_state(one, other):
    moments = [
        torch.equal(torch.as_tensor(one["moments"][place][name]), torch.as_tensor(value))
        for place, state in other["moments"].items()
        for name, value in state.items()
    ]
    averages = zip(one["averages"], other["averages"], strict=True)
    return identical(one["weights"], other["weights"]) and all(moments) and all(identical(a, b) for a, b in averages)


class States(pl.Callback):
    """Keeps everything after every epoch's last step, when the guard, which stands before, has acted."""

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            self.states.append(state_of(trainer, pl_module))


class Adam(Classifier):
    """Has moments, and a rate that falls with every step."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Armed(Adam):
    """Arms the trap by itself, in the middle of an epoch, and only once."""

    def __init__(self, step=None, **options):
        super().__init__(Trap(trained_net(**options)))
        self.step = step

    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == self.step:
            self.net.armed.fill_(1.0)


def collect(trainer, pl_module):
    states = next(callback for callback in trainer.callbacks if isinstance(callback, States)).states
    attack = next(callback for callback in trainer.callbacks if isinstance(callback, AdversarialTraining))
    guard = guard_of(trainer)
    return {
        "states": states,
        "end": state_of(trainer, pl_module),
        "history": guard.history,
        "factor": attack.step_factor,
        "rollbacks": guard.num_rollbacks,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "epochs": trainer.current_epoch,
    }
