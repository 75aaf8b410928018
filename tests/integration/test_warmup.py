"""The first steps are those of DDP; then the codec sets in, at one step on all ranks, resumed or not."""

from __future__ import annotations

import functools
import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from robustdist import UsageError
from robustdist._lightning import PACKAGE
from robustdist.comm import DGC, EF21, QSGD, Identity, PowerSGD, Sign, TopK
from robustdist.comm.controller import BitSchedule
from robustdist.core.testing import toy_images
from robustdist.optim import OneBitAdam
from robustdist.strategies import CompressedDDPStrategy
from tests.integration.support import Classifier, identical, run, shares
from tests.integration.test_comm_state import Overflowing, amp, fit, saving
from tests.integration.test_compressed_ddp import Odd, compressed
from tests.integration.test_conservation import outcome
from tests.integration.test_groups import GROUPS
from tests.integration.test_wrapped_again import Cut, Wide

#: Steps of an epoch of ``fit``, and those before the codec sets in: two of four epochs.
EPOCH, WARMUP = 3, 6


class Record(pl.Callback):
    """Weights, residual norm and bits before every batch, what was said of warm-up, and the state at the end."""

    def __init__(self):
        self.weights, self.norms, self.bits, self.told = [], [], [], []

    def on_train_start(self, trainer, module):
        told = self.told

        class Listen(logging.Handler):
            def emit(self, record):
                if "warmup" in record.getMessage():
                    told.append(record.getMessage())

        logging.getLogger(PACKAGE).addHandler(Listen())  # of this process, which ends with the training

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.weights.append({name: x.clone() for name, x in module.state_dict().items()})
        if isinstance(trainer.strategy, CompressedDDPStrategy):
            memory = trainer.strategy.engine.memory
            self.norms.append(0.0 if memory is None else memory.norm())
            self.bits.append(trainer.strategy.chosen_bits)

    def on_train_end(self, trainer, module):
        if isinstance(trainer.strategy, CompressedDDPStrategy):
            self.state = trainer.strategy._state(trainer.strategy.engine)


def recorded(trainer, module):
    return next(callback for callback in trainer.callbacks if isinstance(callback, Record))


def record(folder, strategy, epochs=4, callbacks=(), **options):
    return fit(folder, strategy, epochs, callbacks=[Record(), *callbacks], collect=recorded, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return what DDP does, and where its checkpoints are."""
    folder = tmp_path_factory.mktemp("ddp")
    strategy = DDPStrategy(start_method="fork", bucket_cap_mb=0.01)
    return record(folder, strategy, callbacks=[saving(folder)])[0].weights, folder


@pytest.mark.parametrize("codec", [Sign(), EF21(TopK(0.1)), PowerSGD(2)], ids=repr)
def test_the_first_steps_are_those_of_ddp(tmp_path, codec, plain):
    weights, _ = plain
    first, second = record(tmp_path, compressed(codec, warmup_steps=WARMUP))
    assert all(identical(*pair) for pair in zip(first.weights, second.weights, strict=True))
    assert all(identical(*pair) for pair in zip(first.weights[: WARMUP + 1], weights, strict=False))
    assert not identical(first.weights[WARMUP + 1], weights[WARMUP + 1])
    assert (first.told, second.told) == ([f"warmup_steps={WARMUP}: done, gradients now travel as {codec!r}"], [])
    assert [norm > 0 for norm in first.norms] == [step > WARMUP for step in range(4 * EPOCH)]


@pytest.mark.parametrize("warmup_steps", [0, WARMUP])
def test_then_it_goes_on_as_a_compressed_training_does(tmp_path, plain, warmup_steps):
    """One that begins with the weights and the optimiser of DDP; steps before its checkpoint count."""
    _, folder = plain
    ours = record(tmp_path, compressed(Sign(), warmup_steps=WARMUP))
    begun = compressed(Sign(), warmup_steps=warmup_steps)
    expected = record(tmp_path, begun, ckpt_path=folder / "epoch=1.ckpt")
    pairs = zip(ours[0].weights[WARMUP:], expected[0].weights, strict=True)
    assert all(identical(*pair) for pair in pairs)


def leaves(state):
    """Return what a nested state holds, by path; tensors as lists."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: leaves(state[key]) for key in sorted(state, key=str)}
    return [leaves(item) for item in state] if isinstance(state, (list, tuple)) else state


CASES = {
    "both residuals": lambda: compressed(Sign(), collective="chunked", residuals="per_rank", warmup_steps=WARMUP),
    "momentum": lambda: compressed(DGC(0.1), residuals="per_rank", warmup_steps=WARMUP),
    "bits": lambda: compressed(QSGD(), bits=BitSchedule({0: 2, 3: 5}), residuals="per_rank", warmup_steps=WARMUP),
    "groups": lambda: compressed(Sign(), groups=GROUPS, residuals="per_rank", warmup_steps=WARMUP),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return an uninterrupted run by the name of its case, with the folder of its checkpoints."""

    @functools.cache
    def whole(case):
        folder = tmp_path_factory.mktemp("whole")
        return record(folder, CASES[case](), callbacks=[saving(folder)]), folder

    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "epoch"),
    [*(("both residuals", epoch) for epoch in range(3)), ("groups", 0), ("momentum", 1), ("bits", 2), ("groups", 2)],
)
def test_a_resumed_run_switches_at_the_same_step(tmp_path, straight, case, epoch):
    """Interrupted before the switch, at it, and after it."""
    whole, folder = straight(case)
    step, path = (epoch + 1) * EPOCH, folder / f"epoch={epoch}.ckpt"
    state = torch.load(path, weights_only=True)
    assert state["robustdist.communication"]["executed"] == step
    resumed = record(tmp_path, CASES[case](), ckpt_path=path)
    for expected, ours in zip(whole, resumed, strict=True):
        assert len(ours.weights) == 4 * EPOCH - step
        assert all(identical(*pair) for pair in zip(expected.weights[step:], ours.weights, strict=True))
        assert expected.bits[step:] == ours.bits
        assert leaves(expected.state) == leaves(ours.state)


@pytest.mark.slow
def test_bits_wait_for_the_switch(straight):
    (first, _), _ = straight("bits")
    assert first.bits == [None] * WARMUP + [2] * 3 + [5] * 3


@pytest.mark.slow
def test_groups_wait_for_the_switch(tmp_path, capsys):
    def sent(trainer, module):
        router = trainer.strategy._route.router
        return router.sent, router.join, next(each for each in trainer.callbacks if isinstance(each, Groups)).seen

    class Groups(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seen.append(trainer.strategy._route.router.join)

    results = fit(tmp_path, compressed(Sign(), groups="auto", warmup_steps=3), 4, callbacks=[Groups()], collect=sent)
    assert results[0] == results[1]
    # five steps are watched from the switch on
    assert results[0][2] == [False] * 8 + [True] * 4


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"accumulate_grad_batches": 2}, Classifier), ({"plugins": [amp()]}, lambda net: Overflowing(at=1))],
    ids=["accumulation", "skipped steps"],
)
def test_executed_steps_count(tmp_path, options, kind):
    """Two in an epoch of three batches, since the first ones are accumulated, or the second one is skipped."""

    class Steps(pl.Callback):
        def __init__(self):
            self.dense = {}

        def on_before_optimizer_step(self, trainer, module, optimizer):
            engine = trainer.strategy.engine
            self.dense[engine.num_steps] = engine.dense

    def steps(trainer, module):
        callback = next(each for each in trainer.callbacks if isinstance(each, Steps))
        return callback.dense, trainer.strategy._final_state["executed"], module.state_dict()

    def train(**more):
        strategy, callbacks = compressed(Sign(), warmup_steps=5), [Steps(), saving(tmp_path / "saved")]
        return fit(tmp_path, strategy, 4, module=kind(Odd()), callbacks=callbacks, collect=steps, **options, **more)

    first, second = train()
    assert identical(first[2], second[2])
    for dense, executed, _ in (first, second):
        assert executed == 8
        assert dense == {step: step < 5 for step in range(8)}
    for dense, executed, _ in train(ckpt_path=tmp_path / "saved" / "epoch=1.ckpt"):
        assert executed == 8
        assert dense == {step: step < 5 for step in range(4, 8)}


def test_a_training_that_ends_before_the_switch(tmp_path, plain):
    ours = record(tmp_path, compressed(Sign(), warmup_steps=100), epochs=1)
    assert identical(ours[0].weights[-1], plain[0][EPOCH - 1])
    told = "warmup_steps=100: nothing was compressed, training ended at 3"
    assert [each.told for each in ours] == [[told], []]


def test_nothing_is_lost_of_what_stays_when_parameters_are_cut_before_the_switch(tmp_path):

    def delivered(codec, **options):
        strategy = compressed(codec, collective="chunked", **options)
        return run(
            tmp_path, Wide(), shares(*toy_images(96), 8), processes=2, strategy=strategy, callbacks=[Cut()],
            use_distributed_sampler=False, collect=outcome,
        )[0]  # fmt: skip

    expected, _ = delivered(Identity())
    ours, kept = delivered(Sign(), warmup_steps=4)
    assert kept
    for name, total in expected.items():
        left = kept[name].double().view(total.shape) if name in kept else 0.0
        assert float((ours[name] + left - total).norm()) < 1e-5 * float(total.norm()), name


@pytest.mark.parametrize("steps", [-1, 1.5, True, "10"])
def test_a_wrong_number(steps):
    with pytest.raises(UsageError, match=f"warmup_steps={steps!r} must be a whole number of optimiser steps, or 0"):
        CompressedDDPStrategy(Sign(), warmup_steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(("variance", "limit"), [("onebit", 4), ("zero_one", 3)])
def test_not_longer_than_that_of_one_bit_adam(tmp_path, variance, limit):
    class Trained(Classifier):
        def configure_optimizers(self):
            return OneBitAdam(self.named_parameters(), lr=0.01, freeze_step=4, variance=variance, kappa=2)

    with pytest.raises(Exception, match=f"warmup_steps=5 exceeds the {limit} steps in which OneBitAdam averages"):
        fit(tmp_path, compressed(Sign(), warmup_steps=5), 1, module=Trained(Odd()))
    fit(tmp_path, compressed(Sign(), warmup_steps=limit), 2, module=Trained(Odd()))


def test_different_numbers_on_different_processes(tmp_path):
    class Different(CompressedDDPStrategy):
        def configure_ddp(self):
            self._engine_options["warmup_steps"] += self.global_rank
            super().configure_ddp()

    with pytest.raises(Exception, match=r"the ranks have different settings.*rank 1: .*warmup_steps=4"):
        fit(tmp_path, Different(Sign(), start_method="fork", warmup_steps=3), 1)
