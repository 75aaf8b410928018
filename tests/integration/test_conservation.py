"""Under the Trainer: what was delivered and what is kept is what was put in, whatever the loop does."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.comm import QSGD, Identity, Sign, TopK
from robustdist.core.testing import toy_images
from tests.integration.support import run, shares
from tests.integration.test_comm_state import amp
from tests.integration.test_compressed_ddp import Odd, compressed


class Summing(pl.LightningModule):
    """Weights stay, so gradients depend on nothing that was delivered; sums up the gradients of executed steps."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([Odd(), Odd()])
        self.delivered = {}

    def loss(self, batch, *nets):
        return sum(F.cross_entropy(self.nets[net](batch[0]), batch[1]) for net in nets)

    def training_step(self, batch, batch_idx):
        return self.loss(batch, 0, 1)

    def on_before_optimizer_step(self, optimizer):
        parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.named_parameters():
            if parameter in parameters and parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()):
                self.delivered[name] = self.delivered.get(name, 0.0) + parameter.grad.double()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Alternating(Summing):
    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx % 2)


class Unequal(Summing):
    """Each process uses a net of its own in some steps."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch, self.global_rank) if batch_idx % 3 else self.loss(batch, 0, 1)


class Rivals(Summing):
    """Two optimisers by turns; each clears the gradients of its own net alone, so the other's stay where they are."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for net, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, net))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.0) for net in self.nets]


class Overflowing(Summing):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == 1 else loss


class Replaced(Summing):
    """Another optimiser takes the place of the first one, as wrappers do."""

    def on_train_start(self):
        self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.0)]


def outcome(trainer, module):
    # of the executed steps; the mean over ranks, with what owners keep for all of them
    kept = trainer.strategy._final_state.get("memory", {}).get("residual", {})
    return module.delivered, kept


CASES = {
    "all used": (Summing, {}, {}),
    "by turns": (Alternating, {"find_unused_parameters": True}, {}),
    "on one rank": (Unequal, {"find_unused_parameters": True}, {}),
    "two optimisers": (Rivals, {"find_unused_parameters": True}, {}),
    "accumulation": (Summing, {}, {"accumulate_grad_batches": 2}),
    "skipped step": (Overflowing, {}, {"plugins": [amp()]}),
    "replaced optimiser": (Replaced, {}, {}),
}


def train(folder, case, compressor):
    kind, strategy, options = CASES[case]
    return run(
        folder, kind(), shares(*toy_images(96), 8), processes=2, collect=outcome, use_distributed_sampler=False,
        strategy=compressed(compressor, collective="chunked", **strategy), **options,
    )[0]  # fmt: skip


@pytest.fixture(scope="module")
def put_in(tmp_path_factory):
    """Return the sums of gradients of a case, which no codec changes: weights stay."""
    return functools.cache(lambda case: train(tmp_path_factory.mktemp("exact"), case, Identity())[0])


@pytest.mark.parametrize("codec", [Sign(), TopK(0.1), QSGD(bits=4)], ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(tmp_path, put_in, case, codec):
    expected = put_in(case)
    delivered, kept = train(tmp_path, case, codec)
    assert expected.keys() == delivered.keys()
    assert any(bool(vector.any()) for vector in kept.values())
    scale = sum(float(total.square().sum()) for total in expected.values()) ** 0.5
    for name, total in expected.items():
        left = kept[name].double().view(total.shape) if name in kept else 0.0
        assert float((delivered[name] + left - total).norm()) < (2e-3 if case == "skipped step" else 1e-5) * scale
