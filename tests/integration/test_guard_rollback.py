"""What the guard does at a collapse: told, rolled back, stopped, limited."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from robustdist.callbacks import CatastrophicOverfittingGuard
from robustdist.errors import RobustDistWarning
from tests.integration.guard_support import (
    Armed,
    States,
    Trap,
    collect,
    guard_of,
    history,
    module,
    same_state,
    strong,
    training,
)

from .support import Classifier, loader, trained_net


class Collapse(pl.Callback):
    """Arms the trap at the beginning of the given epochs."""

    def __init__(self, *epochs: int):
        self.epochs = epochs

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.epochs:
            pl_module.net.armed.fill_(1.0)


def test_a_collapse_is_told_and_the_best_checkpoint_is_from_before(launch, images, tmp_path):
    x, y = images(64)
    checkpoint = ModelCheckpoint(tmp_path / "best", filename="{epoch}", monitor="guard/multi_step_acc", mode="max")
    net = Trap(trained_net())
    good = copy.deepcopy(net.net.state_dict())

    def shifted(shift):
        return {**good, "head.bias": good["head.bias"] + torch.tensor([shift, 0.0, 0.0, 0.0])}

    class Script(Collapse):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net.net.load_state_dict(shifted((0.6, 0.3, 0.0, 0.0)[trainer.current_epoch]))
            super().on_train_epoch_start(trainer, pl_module)

    with pytest.warns(RobustDistWarning, match="catastrophic overfitting in epoch 3") as caught:
        (entries,) = launch(
            Classifier(net, lr=0.0),
            loader(x, y),
            callbacks=[Script(2, 3), training(), CatastrophicOverfittingGuard(strong(), num_samples=64), checkpoint],
            collect=history,
            max_epochs=4,
            enable_checkpointing=True,
        )
    first, second, third, _ = entries
    assert first["multi_step_acc"] < second["multi_step_acc"]
    assert third["multi_step_acc"] < 0.5 * second["multi_step_acc"]
    assert third["one_step_acc"] > second["one_step_acc"]
    assert [entry["collapsed"] for entry in entries] == [False, False, True, True]
    assert checkpoint.best_model_path.endswith("epoch=1.ckpt")
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, RobustDistWarning)]
    assert len(ours) == 1, "once per collapse"
    assert f"{third['multi_step_acc']:.1%}" in ours[0]
    assert f"{third['one_step_acc']:.1%}" in ours[0]
    assert "NFGSM" in ours[0]
    assert "\n" not in ours[0]


@pytest.mark.filterwarnings("default::robustdist.errors.RobustDistWarning")  # raised in a forked process otherwise
@pytest.mark.parametrize("processes", [1, 2])
def test_a_rollback_brings_everything_back_on_every_process(launch, images, processes):
    x, y = images(64)
    guard = CatastrophicOverfittingGuard(strong(), num_samples=64, action="rollback")
    with pytest.warns(RobustDistWarning, match="Rolled back") if processes == 1 else nullcontext():
        found = launch(
            Armed(20, batch_norm=True),
            loader(x, y, batch_size=8 // processes, shuffle=True),
            callbacks=[training(), EMAWeightAveraging(decay=0.9), guard, States()],
            collect=collect,
            max_epochs=4,
            processes=processes,
        )
    for own in found:
        first, second, third, fourth = own["states"]
        assert [entry["collapsed"] for entry in own["history"]] == [False, False, True, False]
        assert second["weights"]["net.armed"] == 0
        assert same_state(second, third)
        assert not any(same_state(second, other) for other in (first, fourth))
        # the rollback is not a step back in time
        assert own["rate"] == pytest.approx(1e-4 * 0.9**32)
        assert (own["factor"], own["rollbacks"]) == (0.75, 1)
        assert own["history"] == found[0]["history"]


def test_a_rollback_without_averages_or_momentum(launch, images):
    x, y = images(32)
    guard = CatastrophicOverfittingGuard(strong(), action="rollback", step_shrink=0.5)
    with pytest.warns(RobustDistWarning, match=r"step of the training attack is now 0\.5 times"):
        (own,) = launch(
            module(lr=0.01),
            loader(x, y),
            callbacks=[training(), guard, Collapse(1), States()],
            collect=collect,
            max_epochs=2,
        )
    assert same_state(*own["states"])


def test_a_collapse_after_a_recovery_is_told_again(launch, images):
    x, y = images(32)

    class Switch(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net.armed.fill_(float(trainer.current_epoch in (1, 2, 4)))

    with pytest.warns(RobustDistWarning) as caught:
        launch(
            module(),
            loader(x, y),
            callbacks=[training(), CatastrophicOverfittingGuard(strong()), Switch()],
            max_epochs=5,
        )
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, RobustDistWarning)]
    assert [message.split(" (step")[0][-7:] for message in ours] == ["epoch 2", "epoch 5"]


class Manual(Classifier):
    def __init__(self):
        super().__init__(Trap(trained_net()), lr=0.01)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        # two batches per step: at the end of an epoch of three the third is half a step
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_a_rollback_in_manual_optimisation(launch, images):
    x, y = images(24)
    with pytest.warns(RobustDistWarning, match="Rolled back"):
        (own,) = launch(
            Manual(),
            loader(x, y),
            callbacks=[training(), CatastrophicOverfittingGuard(strong(), action="rollback"), Collapse(1), States()],
            collect=lambda trainer, pl_module: (
                collect(trainer, pl_module),
                [parameter.grad for parameter in pl_module.parameters()],
            ),
            max_epochs=2,
        )
    results, gradients = own
    assert [entry["step"] for entry in results["history"]] == [1, 2]
    assert same_state(*results["states"])
    # half a step at weights that are gone
    assert gradients == [None] * len(gradients)


def test_the_one_step_attack_is_as_short_as_rollbacks_made_it(launch, images):
    x, y = images(32)
    guard = CatastrophicOverfittingGuard(strong(), action="rollback", step_shrink=0.01)
    with pytest.warns(RobustDistWarning, match="Rolled back"):
        (own,) = launch(
            module(),
            loader(x, y),
            callbacks=[training(), guard, Collapse(1), States()],
            collect=collect,
            max_epochs=3,
        )
    net = trained_net()
    clean = float((net(x).argmax(1) == y).float().mean())
    accuracies = [entry["one_step_acc"] for entry in own["history"]]
    assert accuracies[0] == accuracies[1] < accuracies[2] == pytest.approx(clean)


def test_a_monitor_that_looks_in_validation_sees_this_epoch(launch, images):
    x, y = images(32)
    seen = []

    class Look(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["guard/multi_step_acc"]))

    (entries,) = launch(
        module(lr=0.1),
        loader(x, y),
        loader(x, y),
        callbacks=[training(), CatastrophicOverfittingGuard(strong(), fall=0.9), Look()],
        collect=history,
        max_epochs=3,
    )
    assert seen == pytest.approx([entry["multi_step_acc"] for entry in entries])
    assert len(set(seen)) > 1


def test_the_number_of_rollbacks_is_limited(launch, images):
    x, y = images(32)
    guard = CatastrophicOverfittingGuard(strong(), action="rollback", step_shrink=0.5, max_rollbacks=2)
    with pytest.warns(RobustDistWarning) as caught:
        (own,) = launch(
            module(),
            loader(x, y),
            callbacks=[training(), guard, Collapse(1, 2, 3, 4), States()],
            collect=collect,
            max_epochs=5,
        )
    assert (own["factor"], own["rollbacks"]) == (0.25, 2)
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, RobustDistWarning)]
    assert ["Rolled back" in message for message in ours] == [True, True, False]
    assert "max_rollbacks=2" in ours[-1]
    assert [bool(state["weights"]["net.armed"]) for state in own["states"]] == [False, False, False, True, True]


def test_stop_ends_training_with_the_last_good_weights(launch, images):
    x, y = images(32)
    guard = CatastrophicOverfittingGuard(strong(), action="stop")
    with pytest.warns(RobustDistWarning, match="Training stops"):
        (own,) = launch(
            module(lr=0.01),
            loader(x, y),
            callbacks=[training(), guard, Collapse(2, 3, 4), States()],
            collect=collect,
            max_epochs=6,
        )
    assert [entry["collapsed"] for entry in own["history"]] == [False, False, True]
    assert len(own["states"]) == 3
    assert same_state(own["states"][1], own["end"])
    assert own["factor"] == 1.0


def test_warn_keeps_no_copy_of_the_weights(launch, images):
    x, y = images(16)
    states = launch(
        module(),
        loader(x, y),
        callbacks=[training(), CatastrophicOverfittingGuard(num_samples=8)],
        collect=lambda trainer, pl_module: guard_of(trainer).state_dict(),
    )
    assert states[0]["snapshot"] is None
    assert [len(part) for part in states[0]["samples"]] == [8, 8]


def test_a_collapse_under_every_attack_is_called_by_its_name(launch, images):
    x, y = images(32)

    class Ruin(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.net.net.head.weight.data.zero_()
                pl_module.net.net.head.bias.data.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))

    guard = CatastrophicOverfittingGuard(strong())
    with pytest.warns(RobustDistWarning, match="training has collapsed in epoch 2.*LinearRamp"):
        launch(module(), loader(x, y), callbacks=[training(), guard, Ruin()], max_epochs=2)
