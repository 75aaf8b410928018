"""Compressed DDP under a real Trainer with real processes."""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from robustdist.comm import (
    BF16,
    DGC,
    EF21,
    FP16,
    QSGD,
    Identity,
    Int8,
    Natural,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from robustdist.core.testing import toy_images
from robustdist.strategies import CompressedDDPStrategy
from tests.integration.support import Classifier, identical, largest_difference, loader, run
from tests.unit.comm.test_engine import Fragile

CODECS = [
    BF16(), FP16(), Int8(), QSGD(bits=4), QSGD(bits=2), TernGrad(), Sign(), Natural(), TopK(0.05), RandomK(0.05),
    DGC(0.05), EF21(TopK(0.05)), PowerSGD(2),
]  # fmt: skip


class Odd(nn.Module):
    """Layers of odd sizes, biases, a scalar, and enough parameters for several buckets of a few kilobytes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        sizes = [36, 67, 31, 67, 31, 4]
        layers = [nn.Sequential(nn.Linear(one, other), nn.Tanh()) for one, other in pairwise(sizes)]
        self.layers = nn.Sequential(*layers)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gain * self.layers(x.flatten(1))


def fit(folder, strategy, *, processes=2, steps=50, net=None, collect=None, **options):
    x, y = toy_images(32 * processes)
    options = {"max_epochs": -1, "max_steps": steps, **options}
    extra = {} if collect is None else {"collect": collect}
    module = Classifier(net if net is not None else Odd())
    return run(folder, module, loader(x, y), strategy=strategy, processes=processes, **extra, **options)


def compressed(compressor, **options):
    return CompressedDDPStrategy(compressor, start_method="fork", **{"small": 64, "bucket_cap_mb": 0.01, **options})


def weights_and_stats(trainer, module):
    return {**module.state_dict()}, trainer.strategy.comm_stats()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_identity_is_ddp_bit_for_bit(tmp_path, accumulate):
    plain = DDPStrategy(start_method="fork", bucket_cap_mb=0.005)
    expected = fit(tmp_path, plain, accumulate_grad_batches=accumulate)
    ours = fit(tmp_path, compressed(Identity()), accumulate_grad_batches=accumulate)
    assert identical(expected[0], ours[0])
    assert identical(ours[0], ours[1])


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_replicas_stay_identical_to_the_bit(tmp_path, codec):
    (first, stats), (second, _) = fit(
        tmp_path, compressed(codec), accumulate_grad_batches=2, gradient_clip_val=0.5, collect=weights_and_stats
    )
    assert identical(first, second)
    assert stats["steps"] == 50
    assert stats["calls"] > 1.9 * 50  # one bucket at first, then several
    assert 0 < stats["bytes_sent"] < stats["bytes_dense"]
    start = Classifier(Odd()).state_dict()
    assert largest_difference(start, first) > 1e-3


@pytest.mark.parametrize("processes", [3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_replicas_of_more_processes(tmp_path, codec, processes):
    results = fit(tmp_path, compressed(codec), processes=processes, steps=8)
    assert all(identical(results[0], other) for other in results[1:])


def test_a_single_process_trains_as_with_ddp(tmp_path, capsys):
    (ours,) = fit(tmp_path, compressed(QSGD(bits=2)), processes=1)
    (expected,) = fit(tmp_path, DDPStrategy(start_method="fork"), processes=1)
    assert identical(ours, expected)


class Breaking(pl.Callback):
    """The codec of the second process breaks in the third step, which must not reach the optimiser."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.strategy.engine.codec.armed = trainer.global_rank == 1 and trainer.global_step == 2

    def on_before_optimizer_step(self, trainer, module, optimizer):
        assert trainer.global_step < 2


def without_thread(codec, **options):
    """Return a strategy whose engine works as it does with NCCL."""
    strategy = compressed(codec, **options)
    strategy._transport["inline"] = True
    return strategy


def test_the_engine_without_a_thread_trains_alike(tmp_path):
    options = {"steps": 8, "accumulate_grad_batches": 2, "collect": weights_and_stats}
    expected = fit(tmp_path, compressed(Sign(), collective="chunked"), **options)
    ours = fit(tmp_path, without_thread(Sign(), collective="chunked"), **options)
    assert all(identical(one[0], other[0]) for one, other in zip(expected, ours, strict=True))
    assert ours[0][1]["bytes_sent"] == expected[0][1]["bytes_sent"] > 0
    with pytest.raises(Exception, match=r"rank 1: [\s\S]*ArithmeticError: the codec of this rank broke"):
        fit(tmp_path, without_thread(Fragile()), callbacks=[Breaking()])


def test_the_names_that_the_trainer_knows():
    trainer = pl.Trainer(strategy="ddp_compressed", accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy, CompressedDDPStrategy)
    assert repr(trainer.strategy.compressor) == repr(QSGD(bits=4))
    for suffix in ("fork", "spawn"):
        trainer = pl.Trainer(strategy=f"ddp_compressed_{suffix}", accelerator="cpu", devices=2, logger=False)
        assert trainer.strategy._start_method == suffix


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auto_leaves_float32_to_ddp_where_nothing_is_faster(tmp_path, monkeypatch, accumulate):
    monkeypatch.setattr("robustdist.strategies.auto_codec.pick_compressor", lambda *args, **options: Identity())
    options = {"steps": 10, "accumulate_grad_batches": accumulate, "collect": weights_and_stats}
    (ours, stats), _ = fit(tmp_path, compressed("auto"), **options)
    plain = DDPStrategy(start_method="fork", bucket_cap_mb=0.005)
    expected = fit(tmp_path, plain, steps=10, accumulate_grad_batches=accumulate)[0]
    assert identical(ours, expected)
    assert stats["steps"] == 10
    assert stats["bytes_sent"] == stats["bytes_dense"] == 10 * 4 * sum(p.numel() for p in Odd().parameters())


def test_auto_takes_a_codec_that_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr("robustdist.strategies.auto_codec.pick_compressor", lambda *args, **options: Int8())
    (first, stats), (second, _) = fit(tmp_path, compressed("auto"), steps=10, collect=weights_and_stats)
    assert identical(first, second)
    assert stats["ratio"] > 2
