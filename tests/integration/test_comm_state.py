"""What compressed communication keeps between steps survives checkpoints, skipped steps and changes of bits."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision

from robustdist.comm import EF21, QSGD, Int8, PowerSGD, Sign, TopK
from robustdist.comm.controller import BitSchedule
from robustdist.comm.mqgrad import MQGrad
from robustdist.core.testing import toy_images
from robustdist.strategies.comm_checkpoint import KEY
from tests.integration.support import Classifier, identical, largest_difference, run, shares
from tests.integration.test_compressed_ddp import Odd, compressed


def residuals(trainer, module):
    memory = trainer.strategy.engine.memory
    return {} if memory is None else memory.state_dict()


class Keep(pl.Callback):
    """Keeps the residuals of a rank at the end of training, while there is an engine."""

    def __init__(self):
        self.state = None

    def on_train_end(self, trainer, module):
        self.state = residuals(trainer, module)


def weights_and_residuals(trainer, module):
    (keep,) = [callback for callback in trainer.callbacks if isinstance(callback, Keep)]
    return module.state_dict(), keep.state


def fit(
    folder, strategy, epochs, *, module=None, processes=2, ckpt_path=None, collect=weights_and_residuals, **options
):
    x, y = toy_images(48)
    options = {"callbacks": [Keep()], "enable_checkpointing": True, "use_distributed_sampler": False, **options}
    module = module or Classifier(Odd())
    options = {"max_epochs": epochs, "ckpt_path": ckpt_path, "collect": collect, **options}
    return run(folder, module, shares(x, y, 8), strategy=strategy, processes=processes, **options)


def saving(folder, **options):
    return pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, **options)


EXACT = {
    "both residuals, chunks": lambda: compressed(Sign(), collective="chunked", residuals="per_rank"),
    "draws, no residual": lambda: compressed(QSGD(bits=3), error_feedback=False, residuals="per_rank"),
    "sparse": lambda: compressed(TopK(0.1), residuals="per_rank"),
    "a memory of its own": lambda: compressed(EF21(TopK(0.1)), residuals="per_rank"),
    "low rank": lambda: compressed(PowerSGD(2), residuals="per_rank"),
    "bits": lambda: compressed(QSGD(), bits=BitSchedule({0: 2, 8: 5}), residuals="per_rank"),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, name):
    whole = fit(tmp_path, EXACT[name](), 4, callbacks=[Keep(), saving(tmp_path / "saved")])
    resumed = fit(tmp_path, EXACT[name](), 4, ckpt_path=tmp_path / "saved" / "epoch=1.ckpt")
    for (expected, kept), (ours, ours_kept) in zip(whole, resumed, strict=True):
        assert identical(expected, ours)
        for slot, vectors in kept.items():
            assert vectors.keys() == ours_kept[slot].keys()
            assert all(torch.equal(vectors[key], ours_kept[slot][key]) for key in vectors)


@pytest.mark.parametrize("residuals", ["reduced", "per_rank", "reset"])
def test_a_checkpoint_loads_without_us_and_saving_changes_nothing(tmp_path, residuals):
    strategy = compressed(Sign(), residuals=residuals)
    saved = fit(tmp_path, strategy, 2, callbacks=[Keep(), saving(tmp_path / "saved")])
    unsaved = fit(tmp_path, compressed(Sign()), 2)
    assert identical(saved[0][0], unsaved[0][0])
    checkpoint = torch.load(tmp_path / "saved" / "epoch=1.ckpt", weights_only=True)
    assert checkpoint[KEY]["mode"] == residuals
    module = Classifier(Odd())
    module.load_state_dict(checkpoint["state_dict"], strict=True)


def test_reduced_residuals_are_the_mean_of_all_ranks(tmp_path):
    results = fit(tmp_path, compressed(Sign(), sides=1), 2, callbacks=[Keep(), saving(tmp_path / "saved")])
    kept = [state["residual"] for _, state in results]
    saved = torch.load(tmp_path / "saved" / "epoch=1.ckpt", weights_only=True)[KEY]["memory"]["residual"]
    assert saved.keys() == kept[0].keys() != set()
    for name, mean in saved.items():
        assert torch.allclose(mean, (kept[0][name] + kept[1][name]) / 2)
        assert not torch.equal(kept[0][name], kept[1][name])


def test_another_number_of_processes(tmp_path):
    fit(tmp_path, compressed(Sign()), 1, callbacks=[Keep(), saving(tmp_path / "reduced")])
    results = fit(tmp_path, compressed(Sign()), 2, processes=3, ckpt_path=tmp_path / "reduced" / "epoch=0.ckpt")
    assert all(identical(results[0][0], other) for other, _ in results)
    fit(tmp_path, compressed(Sign(), residuals="per_rank"), 1, callbacks=[Keep(), saving(tmp_path / "exact")])
    with pytest.raises(Exception, match="residuals='per_rank' of 2 processes cannot continue with 3"):
        fit(tmp_path, compressed(Sign()), 2, processes=3, ckpt_path=tmp_path / "exact" / "epoch=0.ckpt")


# --- skipped steps


class Overflowing(Classifier):
    """The loss of the second process is infinite in one step, or that batch is left out on all."""

    def __init__(self, at=None, infinite=True):
        super().__init__(Odd(), momentum=0.0)
        self.at, self.infinite = at, infinite

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if batch_idx != self.at:
            return loss
        return loss * float("inf") if self.infinite and self.global_rank == 1 else loss * 0.0 + loss.detach()


def amp():
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


@pytest.mark.parametrize("codec", [Int8(), Sign(), TopK(0.1)], ids=repr)
def test_a_skipped_step_leaves_no_trace(tmp_path, codec):
    x, y = toy_images(48)
    kept = [x[:16], x[32:]], [y[:16], y[32:]]
    with_overflow = fit(tmp_path, compressed(codec), 1, module=Overflowing(at=1), plugins=[amp()])
    without = run(
        tmp_path, Overflowing(), shares(torch.cat(kept[0]), torch.cat(kept[1]), 8), strategy=compressed(codec),
        processes=2, collect=weights_and_residuals, callbacks=[Keep()], plugins=[amp()], use_distributed_sampler=False,
    )  # fmt: skip
    for (ours, memory), (expected, expected_memory) in zip(with_overflow, without, strict=True):
        assert all(bool(torch.isfinite(vector).all()) for vector in memory["residual"].values())
        # the scale is half as large after the overflow, and float16 rounds otherwise
        assert largest_difference(ours, expected) < 1e-4
        for name, vector in expected_memory["residual"].items():
            assert torch.allclose(memory["residual"][name], vector, atol=1e-3)


def test_a_scaler_that_skips_for_ever_is_stopped(tmp_path):
    class Hopeless(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("inf")

    with pytest.raises(Exception, match=r"100 optimiser steps in a row were skipped.*net\.gain is not finite"):
        fit(tmp_path, compressed(Sign()), 200, module=Hopeless(Odd()), plugins=[amp()])


# --- bits


def test_bits_follow_the_schedule_on_all_ranks(tmp_path):
    class Record(pl.Callback):
        def __init__(self):
            self.bits = []

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.bits.append(trainer.strategy.chosen_bits)

    def recorded(trainer, module):
        return next(callback.bits for callback in trainer.callbacks if isinstance(callback, Record))

    strategy = compressed(QSGD(), bits=BitSchedule({0: 2, 3: 4, 5: 8}))
    results = fit(tmp_path, strategy, 3, callbacks=[Record()], collect=recorded)
    assert results[0] == results[1]
    assert results[0] == [2, 2, 2, 4, 4, 8, 8, 8, 8]


def test_mqgrad_decides_alike_on_all_ranks(tmp_path):
    def state(trainer, module):
        return module.state_dict(), trainer.strategy._bits.state_dict()

    (first, own), (second, other) = fit(
        tmp_path, compressed(QSGD(), bits=MQGrad(interval=2, exploration=0.5)), 8, callbacks=[], collect=state
    )
    assert identical(first, second)
    assert own["bits"] == other["bits"]
    for key, value in own.items():
        assert str(value) == str(other[key]), key


# --- several fits, and what goes back


class Watching(pl.Callback):
    """Residual norm, step and bits at the start of training."""

    def on_train_start(self, trainer, module):
        strategy = trainer.strategy
        self.start = strategy.engine.memory.norm(), strategy._step, strategy.chosen_bits


def test_a_checkpoint_saved_after_training_holds_the_state_and_a_second_fit_goes_on(tmp_path):
    class Saving(pl.Callback):
        """Saves and trains on inside each process: the objects of forked processes do not come back."""

        def __init__(self):
            self.fits = 0
            self.kept = []

        def on_fit_end(self, trainer, module):
            self.fits += 1
            self.kept.append(trainer.strategy._final_state["memory"]["residual"])
            trainer.save_checkpoint(tmp_path / "after.ckpt")
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    def collect(trainer, module):
        (saving,) = [callback for callback in trainer.callbacks if isinstance(callback, Saving)]
        return saving.kept

    (kept,), _ = fit(tmp_path, compressed(Sign()), 2, callbacks=[Saving()], collect=collect)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)[KEY]["memory"]["residual"]
    assert saved.keys() == kept.keys() != set()
    assert all(torch.equal(saved[name], kept[name]) for name in kept)
    assert KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_a_learning_rate_finder_leaves_nothing_behind(tmp_path):
    finder = pl.callbacks.LearningRateFinder(num_training_steps=12, min_lr=1e-4, max_lr=1e-2, update_attr=True)

    def collect(trainer, module):
        return next(callback.start for callback in trainer.callbacks if isinstance(callback, Watching))

    strategy = compressed(QSGD(), bits=BitSchedule({0: 8, 10: 2}))
    for norm, step, bits in fit(tmp_path, strategy, 1, callbacks=[finder, Watching()], collect=collect):
        assert norm == 0
        assert step == 0
        assert bits == 8
