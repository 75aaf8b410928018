"""Checkpoints of pruned modules: loaded, resumed, written after an exception or after the fit."""

import copy
import sys

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)

from robustdist.core.testing import toy_images
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.pruning import PruningRecipe, load_pruned, pruned_loading
from robustdist.strategies.replicas import replica_digest
from tests.integration.pruning_support import NUM_STEPS, Module, X, fitted, loader, pruning, size, trainer_of


def test_files_before_and_after_the_removal(tmp_path, monkeypatch):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer, module = fitted(tmp_path, [pruning(), saved], enable_checkpointing=True)
    masked, small = tmp_path / "step=7.ckpt", tmp_path / "step=16.ckpt"
    plain = Module.load_from_checkpoint(masked)
    assert size(plain) == size(Module())
    assert (plain.net.conv1.weight.abs().sum((1, 2, 3)) == 0).sum() >= 3
    with pytest.raises(UsageError, match=r"holds a pruned model: load it with robustdist.pruning.load_pruned\(Module"):
        Module.load_from_checkpoint(small)
    x = toy_images(8)[0]
    expected = module.eval()(x)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch_pruning", None)  # as where it is not installed
        assert torch.equal(load_pruned(Module, small).eval()(x), expected)
    with pruned_loading():
        assert torch.equal(Module.load_from_checkpoint(small).eval()(x), expected)
    content = torch.load(small, weights_only=True)
    recipe = PruningRecipe.from_dict(content["robustdist.pruning"])
    assert recipe == module.pruning_recipe
    assert recipe.provenance["method"] == "taylor"
    fresh = Module()
    trainer_of(tmp_path, [pruning()]).validate(fresh, loader(), ckpt_path=small, verbose=False)
    assert torch.equal(fresh.eval()(x), expected)
    with pytest.raises(UsageError, match="build a fresh Module"):
        trainer.validate(module, loader(), ckpt_path=masked, verbose=False)


@pytest.mark.filterwarnings("ignore:method='l0'")  # masks learn little in so few steps
@pytest.mark.parametrize("step", [2, 6, 8, 12])
@pytest.mark.parametrize(
    "options", [{"distill": 0.5}, {"method": "l0"}, {"method": "hydra"}], ids=["distilled", "l0", "hydra"]
)
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, step, options):
    """Broken off while scores are gathered, while units are masked, right after the removal, while tuning."""
    # Lightning resumes at the end of an epoch: of two steps here
    settings = {"data": loader(16), "max_epochs": NUM_STEPS // 2}
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    callbacks = [pruning(**options), EMAWeightAveraging(decay=0.9), saved]
    _, whole = fitted(tmp_path, callbacks, enable_checkpointing=True, **settings)
    callbacks = [pruning(**options), EMAWeightAveraging(decay=0.9)]
    _, resumed = fitted(tmp_path, callbacks, seed=5, ckpt_path=tmp_path / f"step={step}.ckpt", **settings)
    assert resumed.pruning_recipe == whole.pruning_recipe
    assert replica_digest(resumed) == replica_digest(whole)


def test_another_target_in_a_resumed_training_is_told(tmp_path):
    trainer, _ = fitted(tmp_path, [pruning()], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    with pytest.warns(RobustDistWarning, match="a removal that is done stays as it is"):
        fitted(tmp_path, [pruning(target={"width": 0.25})], ckpt_path=tmp_path / "small.ckpt")


def test_files_of_weights_alone_and_files_after_the_fit_have_the_recipe(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_weights_only=True)
    trainer, module = fitted(tmp_path, [pruning(), saved], enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    for name in ("step=16.ckpt", "after.ckpt"):
        assert replica_digest(load_pruned(Module, tmp_path / name)) == replica_digest(module)


@pytest.mark.parametrize("further", [[], [pruning()]], ids=["tuned", "pruned again"])
def test_a_pruned_module_is_trained_on_and_loads_again(tmp_path, further):
    trainer, first = fitted(tmp_path, [pruning()])
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    module = load_pruned(Module, tmp_path / "first.ckpt")
    trainer = trainer_of(tmp_path, further)
    trainer.fit(module, loader())
    assert (size(module) < size(first)) == bool(further)
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    assert torch.equal(load_pruned(Module, tmp_path / "second.ckpt").eval()(X), module.eval()(X))


@pytest.mark.parametrize("at", [4, 12])
def test_a_file_written_for_an_exception_is_as_good_as_any(tmp_path, at):
    """By a callback that comes after ours: while units are masked, and while norms are averaged anew."""

    class Stop(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.global_step == at:
                raise KeyboardInterrupt

    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    callbacks = [pruning(distill=0.5), Stop(), saved, OnExceptionCheckpoint(tmp_path, "stopped")]
    with pytest.raises(SystemExit):
        fitted(tmp_path, callbacks, data=loader(16), max_epochs=NUM_STEPS // 2, enable_checkpointing=True)
    expected, found = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["callbacks"]["StructuredPruning"]
        for name in (f"step={at}", "stopped")
    )
    teachers = expected.pop("teacher"), found.pop("teacher")
    assert teachers[0].keys() == teachers[1].keys()
    assert all(map(torch.equal, teachers[0].values(), teachers[1].values()))
    sums = expected["criterion"].pop("sums"), found["criterion"].pop("sums")
    assert all(map(torch.equal, sums[0].values(), sums[1].values()))
    assert found == expected
    assert bool(found["recalibration"]["left"]) == (at == 12)


def test_a_copy_made_in_the_fit_loads_pruned_files(tmp_path):
    class Copies(Callback):
        def on_train_start(self, trainer, pl_module):
            self.copy = copy.deepcopy(pl_module)

    copies = Copies()
    trainer, module = fitted(tmp_path, [pruning(), copies])
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    trainer.validate(copies.copy, loader(), ckpt_path=tmp_path / "small.ckpt", verbose=False)
    assert replica_digest(copies.copy) == replica_digest(module)


@pytest.mark.parametrize("step", [2, 6, 12])
def test_a_second_distillation_resumes_in_a_fresh_module(tmp_path, step):
    """Of a module that a first fit made small, which is the teacher: before, while and after more units go."""
    trainer, _ = fitted(tmp_path, [pruning()])
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    settings = {"max_epochs": NUM_STEPS // 2, "enable_checkpointing": True}

    def second(module, name, ckpt_path=None):
        saved = ModelCheckpoint(dirpath=tmp_path / name, filename="{step}", every_n_epochs=1, save_top_k=-1)
        callback = pruning(distill=0.5, bn_recalibration_batches=2)
        trainer_of(tmp_path, [callback, saved], **settings).fit(module, loader(16), ckpt_path=ckpt_path)
        return module

    whole = second(load_pruned(Module, tmp_path / "first.ckpt"), "whole")
    file = tmp_path / "whole" / f"step={step}.ckpt"
    resumed = second(Module(), "resumed", file)
    assert resumed.pruning_recipe == whole.pruning_recipe
    assert replica_digest(resumed) == replica_digest(whole)
    if step < 8:  # the module as the first fit left it is as good
        again = second(load_pruned(Module, tmp_path / "first.ckpt"), "again", file)
        assert replica_digest(again) == replica_digest(whole)
    else:
        with pytest.raises(UsageError, match=r"the teacher in ckpt_path .* build a fresh Module"):
            second(load_pruned(Module, file), "refused", file)
