"""The guard in resumed and new trainings, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard
from robustdist.errors import RobustDistWarning, UsageError
from tests.integration.guard_support import Armed, States, collect, module, same_state, strong, training

from .support import Classifier, identical, loader, shares


@pytest.mark.filterwarnings("default::robustdist.errors.RobustDistWarning")  # raised in a forked process otherwise
@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_training_acts_like_an_uninterrupted_one(launch, images, tmp_path, processes):
    x, y = images(64)

    def train(folder, **options):
        callbacks = [
            training(),
            EMAWeightAveraging(decay=0.9),
            CatastrophicOverfittingGuard(strong(), num_samples=30, action="rollback"),
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
            States(),
        ]
        with pytest.warns(RobustDistWarning, match="Rolled back") if processes == 1 else nullcontext():
            return launch(
                Armed(20),
                shares(x, y, 8 // processes),
                callbacks=callbacks,
                collect=collect,
                max_epochs=4,
                processes=processes,
                enable_checkpointing=True,
                use_distributed_sampler=False,
                **options,
            )

    whole = train(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "epoch=1.ckpt"
    half = train(tmp_path / "half", ckpt_path=checkpoint)
    for one, other in zip(whole, half, strict=True):
        assert one["history"] == other["history"]
        assert [entry["collapsed"] for entry in other["history"]] == [False, False, True, False]
        assert same_state(one["states"][2], other["states"][0])
        assert same_state(one["end"], other["end"])
        assert (other["factor"], other["rollbacks"]) == (0.75, 1)
    saved = torch.load(checkpoint, weights_only=True)
    (ours,) = (state for key, state in saved["callbacks"].items() if "Guard" in key)
    assert ours["snapshot"]["step"] == 16
    # nothing of it is part of the module
    assert not any("guard" in name.lower() for name in saved["state_dict"])


def test_nothing_is_lost_between_saving_and_loading(launch, images):
    x, y = images(16)
    saved = CatastrophicOverfittingGuard(strong(), num_samples=8, action="rollback")
    launch(module(), loader(x, y), callbacks=[training(), saved])
    state = saved.state_dict()
    assert 0 < state["best_ratio"] <= 1
    loaded = CatastrophicOverfittingGuard(strong(), num_samples=8, action="rollback")
    loaded.load_state_dict(state)
    again = loaded.state_dict()
    assert again.keys() == state.keys()
    tensors = "samples", "snapshot"
    assert {key: again[key] for key in again if key not in tensors} == {k: state[k] for k in state if k not in tensors}
    assert all(torch.equal(one, other) for one, other in zip(again["samples"], state["samples"], strict=True))
    assert identical(again["snapshot"]["tensors"], state["snapshot"]["tensors"])


def test_a_new_training_starts_anew(launch, images):
    x, y = images(16)
    guard = CatastrophicOverfittingGuard(num_samples=8)
    for count in (16, 12):
        launch(module(), loader(x[:count], y[:count]), callbacks=[training(), guard])
        assert len(guard.history) == 1


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (lambda: [], "the Trainer has 0"),
        (lambda: [training(forward=lambda module, x, batch: module(x))], "name a sub-module"),
        (lambda: [AdversarialTraining(attack=PGD(bounds=None))], None),
    ],
)
def test_what_does_not_fit_is_refused_before_training(launch, images, callbacks, words):
    x, y = images(16)
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        launch(module(), loader(x, y), callbacks=[*callbacks(), CatastrophicOverfittingGuard()])


def test_other_tasks_are_refused_before_the_first_step(launch, images):
    class Regression(Classifier):
        def training_step(self, batch, batch_idx):
            self.seen.append(batch[0])
            return (self(batch[0]) - batch[1]).square().mean()

    regression = Regression()
    attack = PGD(attack_loss=lambda output, target: (output - target).square().mean(1))
    with pytest.raises(UsageError, match="the guard counts right classes"):
        launch(
            regression,
            loader(images(16)[0], torch.rand(16, 4)),
            callbacks=[AdversarialTraining(attack=attack, input_key=0, target_key=1), CatastrophicOverfittingGuard()],
        )
    assert regression.seen == []
