"""Averages of the weights keep no statistics from before a removal: batch norms of the averaged weights themselves."""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

from robustdist.attacks import FGSM
from robustdist.callbacks import AdversarialTraining
from robustdist.objectives import PGDAT
from tests.integration.pruning_support import Module, loader, pruning, trainer_of

BATCHES = 5
OPTIONS = {"bn_recalibration_batches": BATCHES, "schedule": {"start": 0.3}}


class CallsPart(Module):
    """Dropout in front, and a step that calls a part, not the module."""

    def __init__(self, width=8):
        super().__init__(width=width)
        self.net.stem.register_forward_hook(lambda layer, given, out: F.dropout(out, 0.5, layer.training))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


class CallsParts(Module):
    """A step that calls parts with norms one after the other."""

    def training_step(self, batch, batch_idx):
        net, (x, y) = self.net, batch
        x = net.conv2(net.norm1(net.conv1(net.stem(x))))
        x = net.grouped(net.depthwise(x))
        return F.cross_entropy(net.head(F.adaptive_avg_pool2d(x, 4).flatten(1)), y)


class Naive(Callback):
    """Each batch after the removal once more through the average of the weights as it was, by hand."""

    def __init__(self, average):
        self.average, self.found, self.inputs = average, [], []

    def on_train_start(self, trainer, pl_module):
        pl_module.net.register_forward_pre_hook(self.note)

    def note(self, net, args):
        if net.training:
            self.inputs.append((args[0].detach().clone(), torch.get_rng_state()))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.inputs.clear()
        self.before = copy.deepcopy(self.average._average_model.module.net)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if hasattr(pl_module, "pruning_recipe") and len(self.found) <= BATCHES:
            self.found.append(self.statistics() if hasattr(self, "small") else None)
            self.small = True

    def statistics(self):
        x, state = self.inputs[-1]  # an attack comes first
        net = self.before.train()
        norms = [net.stem[1], net.norm1]
        for norm in norms:
            norm.momentum = 1.0
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(state)
            net(x)
        return [norm.running_mean for norm in norms], [norm.running_var for norm in norms]


class AtEnd(Callback):
    """The average's norms right after the last of the batches."""

    def __init__(self, average):
        self.average, self.seen = average, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += hasattr(pl_module, "pruning_recipe")
        if self.seen == BATCHES + 1:
            self.averaged = copy.deepcopy(self.average._average_model.module.net)
            self.own = copy.deepcopy(pl_module.net)
            self.everybody = trainer.strategy.all_gather(self.averaged.norm1.running_mean)


def check(naive, end):
    means, variances = (
        [torch.stack(batches).mean(0) for batches in zip(*found, strict=True)]
        for found in zip(*naive.found[1:], strict=True)
    )
    for norm, mean, variance in zip((end.averaged.stem[1], end.averaged.norm1), means, variances, strict=True):
        assert torch.allclose(norm.running_mean, mean, atol=1e-6)
        assert torch.allclose(norm.running_var, variance, rtol=1e-5)
        assert norm.num_batches_tracked == BATCHES


@pytest.mark.parametrize("first", [True, False], ids=["average first", "pruning first"])
@pytest.mark.parametrize("module_class", [Module, CallsPart])
@pytest.mark.parametrize("attacked", [False, True])
def test_norms_are_those_of_the_averaged_weights(tmp_path, first, module_class, attacked):
    average = EMAWeightAveraging(decay=0.9)
    naive, end = Naive(average), AtEnd(average)
    callbacks = [average, pruning(**OPTIONS)] if first else [pruning(**OPTIONS), average]
    training = [AdversarialTraining(PGDAT(), FGSM(eps=0.1, model_mode="train"))] if attacked else []
    pl.seed_everything(0)
    module = module_class()
    trainer_of(tmp_path, [*training, *callbacks, naive, end]).fit(module, loader())
    check(naive, end)
    assert not torch.allclose(end.averaged.norm1.running_mean, end.own.norm1.running_mean, atol=1e-4)
    assert "update_parameters" not in vars(average._average_model)


@pytest.mark.parametrize("options", [{"use_buffers": False}, {"update_starting_at_step": 14}, {"decay": 0.9}])
def test_statistics_are_those_of_the_module_where_the_average_has_no_calls_of_its_own(tmp_path, options):
    """Buffers that are copied anyway, an average that has not begun, calls that cannot be repeated."""
    average = EMAWeightAveraging(**options)
    end = AtEnd(average)
    pl.seed_everything(0)
    module = CallsParts() if "decay" in options else Module()
    trainer_of(tmp_path, [pruning(**OPTIONS), average, end]).fit(module, loader())
    for averaged, own in zip(end.averaged.buffers(), end.own.buffers(), strict=True):
        assert torch.equal(averaged, own)


class OnRanks(Callback):
    def __init__(self, naive, end):
        self.naive, self.end = naive, end

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 0:
            check(self.naive, self.end)
        assert torch.equal(*self.end.everybody)


def test_ranks_agree(tmp_path):
    average = EMAWeightAveraging(decay=0.9)
    naive, end = Naive(average), AtEnd(average)
    pl.seed_everything(0)
    callbacks = [pruning(**OPTIONS), average, naive, end, OnRanks(naive, end)]
    trainer_of(tmp_path, callbacks, devices=2, strategy="robust_ddp_fork").fit(Module(), loader(128))
