"""What cannot work is refused at once, on all processes, naming the option; unusual modules work."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from robustdist import UsageError
from robustdist.comm import QSGD, Identity, Int8, Sign, TopK
from robustdist.comm.controller import FixedBits
from robustdist.core.testing import toy_images
from robustdist.strategies import CompressedDDPStrategy
from tests.integration.support import Classifier, identical, loader, run
from tests.integration.test_compressed_ddp import Odd, compressed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "qsgt"}, "compressor='qsgt' is not known: choose QSGD"),
        ({"ddp_comm_hook": fp16_compress_hook}, "compressor and ddp_comm_hook exclude each other"),
        ({"model_averaging_period": 4}, "compressor and model_averaging_period exclude each other"),
        ({"residuals": "all"}, "residuals='all' must be one of reduced, per_rank, reset"),
        ({"compressor": "auto", "bits": FixedBits(4)}, "bits and compressor='auto' exclude each other"),
        ({"compressor": Int8(), "bits": FixedBits(4)}, r"bits=FixedBits\(bits=4\) needs compressor=QSGD"),
        ({"sides": 3}, "sides=3 must be 1"),
        ({"collective": "ring"}, "collective='ring' must be one of"),
        ({"compressor": Sign(), "collective": "native"}, "collective='native' adds payloads"),
    ],
)
def test_options(options, message):
    with pytest.raises(UsageError, match=message):
        CompressedDDPStrategy(**options)


@pytest.mark.parametrize("accumulate", [{"accumulate_grad_batches": 2}, {}])
def test_a_static_graph_and_accumulation(tmp_path, accumulate):
    callbacks = [] if accumulate else [GradientAccumulationScheduler({1: 4})]
    strategy = compressed(Int8(), static_graph=True)
    with pytest.raises(Exception, match="static_graph=True and accumulate_grad_batches > 1 exclude each other"):
        run(
            tmp_path, Classifier(), loader(*toy_images(16)), strategy=strategy, processes=2, callbacks=callbacks,
            **accumulate,
        )  # fmt: skip


class Words(pl.LightningModule):
    """A table of which a batch uses two rows."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 16, sparse=sparse)
        self.head = nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        (index,) = batch
        return F.cross_entropy(self.head(self.table(index)), index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients(tmp_path):
    batches = loader(torch.tensor([0, 1] * 8))
    with pytest.raises(Exception, match="table is a Embedding with sparse=True"):
        run(tmp_path, Words(sparse=True), batches, strategy=compressed(Int8()), processes=2)


class Waves(Classifier):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.cfloat))


class Newton(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Waves, "phase is complex, and compressor takes real gradients"), (Newton, "LBFGS and a compressor exclude")],
)
def test_what_would_go_wrong_without_a_word(tmp_path, kind, message):
    with pytest.raises(Exception, match=message):
        run(tmp_path, kind(), loader(*toy_images(16)), strategy=compressed(Int8()), processes=2)


@pytest.mark.parametrize("codec", [Int8(block=16), Sign(block=16), TopK(0.1)], ids=repr)
def test_rows_that_are_never_used_do_not_move(tmp_path, codec):
    module = Words()
    start = module.table.weight.detach().clone()
    results = run(
        tmp_path, module, loader(torch.tensor([0, 1] * 40)), strategy=compressed(codec), processes=2, max_epochs=3
    )
    assert identical(*results)
    table = results[0]["table.weight"]
    assert torch.equal(table[2:], start[2:])
    assert not torch.equal(table[:2], start[:2])


def test_different_settings_on_different_processes(tmp_path):
    class Different(CompressedDDPStrategy):
        def configure_ddp(self):
            self.compressor = QSGD(bits=4 + self.global_rank)
            super().configure_ddp()

    with pytest.raises(Exception, match=r"compressor: the ranks have different settings.*rank 1: .*bits=5"):
        run(tmp_path, Classifier(), loader(*toy_images(16)), strategy=Different(start_method="fork"), processes=2)


class Rivals(pl.LightningModule):
    """Two parts, two optimisers, manual steps: each backward uses one part only."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Sequential(nn.Flatten(), nn.Linear(36, 40)) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        for optimizer, part in zip(self.optimizers(), self.parts, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(part(batch[0]).square().mean() + 0 * sum(p.sum() for p in self.parameters()))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.parts]


@pytest.mark.parametrize("codec", [Identity(), Sign()], ids=repr)
def test_two_optimisers(tmp_path, codec):
    strategy = compressed(codec, find_unused_parameters=True)
    results = run(tmp_path, Rivals(), loader(*toy_images(48)), strategy=strategy, processes=2)
    assert identical(*results)


class Sometimes(Classifier):
    """One of two branches per batch."""

    def __init__(self):
        super().__init__(Odd())
        self.other = Odd()

    def training_step(self, batch, batch_idx):
        net = self.net if batch_idx % 2 else self.other
        return F.cross_entropy(net(batch[0]), batch[1])


@pytest.mark.parametrize("codec", [Sign(), TopK(0.05)], ids=repr)
def test_parameters_that_are_unused_now_and_then(tmp_path, codec):
    strategy = compressed(codec, find_unused_parameters=True)
    results = run(tmp_path, Sometimes(), loader(*toy_images(96)), strategy=strategy, processes=2)
    assert identical(*results)


def test_an_exception_in_a_codec_ends_all_processes_with_its_text(tmp_path):
    class Broken(Int8):
        def encode_parts(self, *args, rank=0, step=0, **options):
            if rank == 1 and step == 2:
                raise ValueError("the codec of this rank has had enough")
            super().encode_parts(*args, rank=rank, step=step, **options)

    with pytest.raises(Exception, match=r"rank 1: (.|\n)*the codec of this rank has had enough"):
        run(tmp_path, Classifier(Odd()), loader(*toy_images(96)), strategy=compressed(Broken()), processes=2)
