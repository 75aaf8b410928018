"""Cheaper forward passes of the attack in a fit: same training, one choice for all processes, said once."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from robustdist.attacks import PGD, Embeddings
from robustdist.callbacks import AdversarialTraining
from robustdist.core import fast_path as core
from robustdist.core.trial import FastPathSettings, Trial
from robustdist.errors import UsageError
from robustdist.objectives import TRADES

from .support import Classifier, Quiet, largest_difference, loader, make_trainer, seeded_net, shares

ATTACK = PGD(eps=1 / 16, step_size=1 / 64, steps=2)
EVERYTHING = {"precision": "bf16", "channels_last": True, "fold_batch_norm": True}


def callback(**options):
    return AdversarialTraining(attack=ATTACK, **options)


def settings(trainer, module):
    return next(c for c in trainer.callbacks if isinstance(c, AdversarialTraining)).fast_path.chosen


@pytest.fixture
def said(caplog):
    """Return the lines that a fast path wrote."""
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if "forward passes of the attack" in r.getMessage()]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_folded_training_equals_ordinary_training_up_to_rounding(launch, images, processes):
    x, y = images(32)
    ends = []
    for options in ({}, {"fold_batch_norm": True, "channels_last": "auto"}):
        module = Classifier(seeded_net(batch_norm=True).double())
        batches = shares(x.double(), y, 8 // processes)
        ends += launch(
            module, batches, callbacks=[callback(**options)], processes=processes, precision="64-true", max_epochs=2
        )
    assert largest_difference(ends[0], ends[processes]) < 1e-9
    seeded_net(batch_norm=True).load_state_dict({k.removeprefix("net."): v for k, v in ends[-1].items()})


def test_the_step_sees_the_real_module(launch, images):
    x, y = images(16)

    class Looking(Classifier):
        def training_step(self, batch, batch_idx):
            assert not {"weight", "bias", "forward"} & (vars(self.net.conv).keys() | vars(self.net.norm).keys())
            assert not torch.is_autocast_enabled("cpu")
            assert self.net.norm.training
            return super().training_step(batch, batch_idx)

    module = Looking(seeded_net(batch_norm=True))
    before = module.net.norm.running_mean.clone()
    (chosen,) = launch(module, loader(x, y), callbacks=[callback(**EVERYTHING)], collect=settings)
    assert chosen == FastPathSettings("bf16", True, True)
    assert not torch.equal(module.net.norm.running_mean, before)
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.net.conv.weight.is_contiguous()


def test_what_was_done_is_said_once(launch, images, said):
    x, y = images(32)
    launch(
        Classifier(seeded_net(batch_norm=True)), loader(x, y), callbacks=[callback(fold_batch_norm=True)], max_epochs=2
    )
    assert said() == ["forward passes of the attack: fold_batch_norm; 1 of 1 batch norms folded into convolutions"]


def test_what_could_not_be_done_is_said_once(launch, images, said):
    x, y = images(32)
    launch(Classifier(), loader(x, y), callbacks=[callback(fold_batch_norm=True)])
    assert said() == [
        "forward passes of the attack: plain; batch norm is not folded: there is none that uses running statistics"
    ]


def test_nothing_is_said_or_measured_without_an_option(launch, images, said):
    x, y = images(16)
    trained = callback(channels_last=True, precision="bf16")
    launch(Classifier(seeded_net(batch_norm=True)), loader(x, y), callbacks=[trained])
    assert said() == []
    assert trained.fast_path.chosen == FastPathSettings("bf16", True)


@pytest.mark.parametrize("objective", [None, TRADES()])
def test_auto_measures_the_real_attack(launch, images, said, objective):
    x, y = images(16)
    trained = AdversarialTraining(
        objective, ATTACK, precision="auto", channels_last="auto", fold_batch_norm="auto", forward="net"
    )
    launch(Classifier(seeded_net(batch_norm=True)), loader(x, y), callbacks=[trained])
    ways = [trial.settings for trial in trained.fast_path.trials]
    assert ways[0] == FastPathSettings()
    assert len(ways) >= 4  # bfloat16 may keep too few signs of such a small net
    assert trained.fast_path.chosen in ways
    (line,) = said()
    assert line == str(trained.fast_path)


@pytest.mark.slow
def test_all_processes_use_the_choice_of_the_first(launch, images, monkeypatch):
    def compare(probe, ways, applied):
        faster = (dist.get_rank() if dist.is_initialized() else 0) == 0
        return [Trial(way, 1.0 if way.fold_batch_norm is faster else 2.0, 1.0) for way in ways], []

    monkeypatch.setattr(core, "compare", compare)
    x, y = images(32)
    chosen = launch(
        Classifier(seeded_net(batch_norm=True)),
        shares(x, y, 4),
        callbacks=[callback(fold_batch_norm="auto")],
        processes=2,
        collect=settings,
    )
    assert chosen == [FastPathSettings(fold_batch_norm=True)] * 2


def test_every_fit_looks_anew(images):
    x, y = images(16)
    trained = callback(fold_batch_norm=True)
    for batch_norm, num_norms in ((True, 1), (False, 0)):
        make_trainer(callbacks=[trained]).fit(Classifier(seeded_net(batch_norm=batch_norm)), loader(x, y))
        assert (trained.fast_path.num_norms, trained.fast_path.num_folded) == (num_norms, num_norms)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_auto_under_other_precisions_of_the_trainer(launch, images, precision):
    x, y = images(16)
    trained = callback(precision="auto", fold_batch_norm="auto")
    launch(Classifier(seeded_net(batch_norm=True)), loader(x, y), callbacks=[trained], precision=precision)
    assert trained.fast_path.chosen.precision == "inherit"


def test_options_are_checked_before_anything_runs():
    with pytest.raises(UsageError, match=r"^fold_batch_norm='always' is unknown"):
        callback(fold_batch_norm="always")
    with pytest.raises(UsageError, match=r"^compile=True needs to know which part"):
        callback(compile=True, forward=lambda module, x, batch: module.net(x))
    with pytest.raises(UsageError, match=r"^compile=True does not go with space=Embeddings"):
        callback(compile=True, space=Embeddings())


@pytest.mark.slow
@pytest.mark.parametrize("forward", [None, "net"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiled_attack_trains_the_same_and_leaves_the_module_uncompiled(
    launch, images, monkeypatch, processes, forward
):
    # captured and differentiated as by the real compiler, but run as it is: no minute of C++
    compiled, real = [], torch.compile

    def capture(function, **options):
        assert options == {"dynamic": False}
        compiled.append(function)
        return real(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", capture)
    x, y = images(24)
    ends = []
    for options in ({}, {"compile": True, "fold_batch_norm": True}):
        module = Quiet(seeded_net(batch_norm=True))
        # 24 images in batches of 16: the last one is smaller
        ends += launch(
            module,
            loader(x, y, batch_size=16 // processes),
            callbacks=[callback(forward=forward, **options)],
            processes=processes,
        )
        assert "forward" not in vars(module.net)
        assert all(parameter.requires_grad for parameter in module.parameters())
    assert largest_difference(ends[0], ends[processes]) < 1e-4
    if processes == 1:  # several compile for themselves
        assert [function.__self__ for function in compiled] == [module if forward is None else module.net]


@pytest.mark.slow
def test_a_forward_that_cannot_be_compiled_is_refused(launch, images, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: function(x).view(7, -1, 11))
    x, y = images(16)
    module = Classifier(seeded_net())
    with pytest.raises(UsageError, match=r"^compile=True failed on this module \(shape .*\): set compile=False"):
        launch(module, loader(x, y), callbacks=[callback(compile=True)])
    assert all(parameter.requires_grad for parameter in module.parameters())
