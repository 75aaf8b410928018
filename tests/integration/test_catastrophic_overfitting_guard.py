"""The guard in a Trainer: what it measures, that it disturbs nothing, and what a rollback brings back."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from robustdist.attacks import FGSM, PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.objectives import DAT, FGSMRS, NFGSM, TRADES

from .support import Classifier, Memory, identical, loader, naive_pgd, seeded_net, shares, trained_net

EPS = 1 / 8


class Trap(nn.Module):
    """A net that is ordinary on whole pixels (n/256) and, once armed, wrong between them.

    One step of a whole number of pixels from a whole pixel does not leave them, several shorter ones do: the net
    holds against one step and falls to several, as after catastrophic overfitting.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.register_buffer("armed", torch.tensor(0.0))

    def forward(self, x):
        between = torch.sin(math.pi * 256 * x).square().flatten(1).mean(1, keepdim=True)
        return self.net(x) * (1 - 8 * self.armed * between)


class Collapse(pl.Callback):
    """Arms the trap at the beginning of the given epochs."""

    def __init__(self, *epochs: int):
        self.epochs = epochs

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.epochs:
            pl_module.net.armed.fill_(1.0)


def training(objective=None, **options):
    return AdversarialTraining(objective, FGSM(eps=EPS), **options)


def strong(**options):
    return PGD(eps=EPS, steps=10, step_size=EPS / 4.3, random_start=False, **options)


def module(lr=0.0, **options):
    return Classifier(Trap(trained_net(**options)), lr=lr)


def guard_of(trainer):
    return next(callback for callback in trainer.callbacks if isinstance(callback, CatastrophicOverfittingGuard))


def history(trainer, pl_module):
    return guard_of(trainer).history


# --- what is measured


def test_samples_without_label_are_left_out(launch, images):
    x, y = images(24)
    gaps = y.clone()
    gaps[:8], gaps[9::2] = -1, -1  # the whole first batch, and every second sample of the others
    net = trained_net()
    chosen = torch.tensor([row for row in range(24) if gaps[row] >= 0])
    attack = PGD(eps=EPS, steps=3, step_size=EPS / 2, random_start=False)
    guard = CatastrophicOverfittingGuard(attack, num_samples=6)
    objective = DAT(0.0)
    (entries,) = launch(
        Classifier(copy.deepcopy(net), lr=0.0), loader(x, gaps), callbacks=[training(objective), guard], collect=history
    )
    rows = chosen[:6]
    x_adv = naive_pgd(net, x[rows], y[rows], EPS, EPS / 2, 3)
    expected = float((net(x_adv).argmax(1) == y[rows]).float().mean())
    assert torch.equal(guard._samples[0], x[rows])
    assert entries[0]["multi_step_acc"] == pytest.approx(expected)
    assert expected > 0


def test_without_any_label_nothing_is_measured(launch, images):
    x, y = images(8)
    guard = CatastrophicOverfittingGuard(strong(), num_samples=6)
    (entries,) = launch(
        module(), loader(x, torch.full_like(y, -1)), callbacks=[training(DAT(0.0)), guard], collect=history
    )
    assert entries == []


def test_accuracies_equal_a_naive_count(launch, images):
    x, y = images(24)
    attack = PGD(eps=EPS, steps=3, step_size=EPS / 2, random_start=False)
    net = trained_net()

    def accuracy(scale, steps, step_size):
        x_adv = naive_pgd(net, x[:12], y[:12], scale * EPS, scale * step_size, steps)
        return float((net(x_adv).argmax(1) == y[:12]).float().mean())

    memory = Memory()
    (entries,) = launch(
        Classifier(copy.deepcopy(net), lr=0.0),
        loader(x, y),
        callbacks=[
            AdversarialTraining(attack=PGD(eps=EPS, steps=2), eps_schedule=LinearRamp(1.0, start=0.4)),
            CatastrophicOverfittingGuard(attack, num_samples=12),
        ],
        collect=history,
        logger=memory,
        max_epochs=2,
    )
    # the radius in use is that of the step to come: of step 4 of 6, and of the last
    full = accuracy(1.0, 3, EPS / 2)
    expected = []
    for scale in (0.4 + 0.6 * 4 / 6, 1.0):
        several, one = accuracy(scale, 3, EPS / 2), accuracy(scale, 1, EPS)
        expected.append([full, one, several / one])
    assert expected[0][1] > expected[1][1] > full > 0
    assert expected[0][2] != expected[1][2] < 1
    for entry, values in zip(entries, expected, strict=True):
        assert [entry["multi_step_acc"], entry["one_step_acc"], entry["ratio"]] == pytest.approx(values)
        assert entry["collapsed"] is False
    assert [(entry["epoch"], entry["step"]) for entry in entries] == [(1, 3), (2, 6)]
    for place, key in enumerate(("guard/multi_step_acc", "guard/one_step_acc", "guard/ratio")):
        assert memory.values(key) == pytest.approx([values[place] for values in expected])


@pytest.mark.parametrize(
    ("objective", "trained_on"),
    [(FGSMRS(1.5), True), (NFGSM(1.0), True), (TRADES(), False), (None, False)],
)
def test_the_one_step_attack_is_that_of_training_if_it_takes_one(launch, images, objective, trained_on):
    x, y = images(24)
    steps = 3 if objective is None else 1
    callback = AdversarialTraining(objective, PGD(eps=EPS, steps=steps))
    net = trained_net()
    attack = callback.attack if trained_on else FGSM(eps=EPS)
    expected = float((net(attack(net, x, y, sample_ids=range(24))).argmax(1) == y).float().mean())
    default = PGD(eps=EPS, steps=10, attack_loss="margin")
    multi_step = float((net(default(net, x, y, sample_ids=range(24))).argmax(1) == y).float().mean())
    (entries,) = launch(
        Classifier(net, lr=0.0), loader(x, y), callbacks=[callback, CatastrophicOverfittingGuard()], collect=history
    )
    assert entries[0]["one_step_acc"] == pytest.approx(expected)
    assert entries[0]["multi_step_acc"] == pytest.approx(multi_step)


def test_weights_are_judged_in_their_own_precision(launch, images):
    x, y = images(48)

    def measured(precision):
        callbacks = [training(), CatastrophicOverfittingGuard(strong(), num_samples=48)]
        return launch(module(), loader(x, y), callbacks=callbacks, collect=history, precision=precision)

    assert measured("bf16-mixed") == measured("32-true")


def test_checks_by_optimiser_steps(launch, images):
    x, y = images(48)
    memory = Memory()
    (entries,) = launch(
        module(),
        loader(x, y),
        callbacks=[training(), CatastrophicOverfittingGuard(num_samples=16, every_n_steps=2)],
        collect=history,
        logger=memory,
        max_epochs=3,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    # 3 steps per epoch, each of two batches
    assert [(entry["epoch"], entry["step"]) for entry in entries] == [(1, 2), (2, 4), (2, 6), (3, 8)]
    assert set(memory.values("guard/one_step_acc")) == {entry["one_step_acc"] for entry in entries}


def test_every_n_epochs(launch, images):
    x, y = images(16)
    guard = CatastrophicOverfittingGuard(every_n_epochs=2)
    (entries,) = launch(module(), loader(x, y), callbacks=[training(), guard], collect=history, max_epochs=5)
    assert [entry["epoch"] for entry in entries] == [2, 4]


def test_two_processes_count_what_one_counts(launch, images):
    x, y = images(32)

    def callbacks():
        # 16 samples: two processes keep the same ones as one. Without random starts, which depend on the order
        return [training(), CatastrophicOverfittingGuard(strong(), num_samples=16, every_n_steps=1, fall=0.9)]

    options = {"collect": history, "max_epochs": 2, "use_distributed_sampler": False}
    (one,) = launch(module(lr=0.125), shares(x, y, 8), callbacks=callbacks(), **options)
    two = launch(module(lr=0.125), shares(x, y, 4), callbacks=callbacks(), processes=2, **options)
    assert two[0] == two[1] == one
    assert [entry["step"] for entry in one] == [2, 3, 4, 5, 6, 7, 8]
    assert len({entry["multi_step_acc"] for entry in one}) > 2


# --- that it disturbs nothing


class Trace(pl.Callback):
    def __init__(self):
        self.draws: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.draws.append(torch.get_rng_state().sum().item())


@pytest.mark.parametrize("action", ["warn", "rollback"])
def test_training_is_the_same_with_and_without_the_guard(launch, images, action):
    x, y = images(48)

    def train(*more):
        trace = Trace()

        def collect(trainer, pl_module):
            return pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"], trace.draws

        torch.manual_seed(3)
        net = seeded_net(batch_norm=True, dropout=0.2)
        torch.manual_seed(4)
        (found,) = launch(
            Classifier(net),
            loader(x, y, shuffle=True),
            callbacks=[training(eps_schedule=LinearRamp(0.5)), *more, trace],
            collect=collect,
            max_epochs=3,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
        )
        return found

    alone = train()
    watched = train(CatastrophicOverfittingGuard(num_samples=20, every_n_steps=1, fall=0.9, action=action))
    assert identical(alone[0], watched[0])
    assert all(torch.equal(alone[1][i]["momentum_buffer"], watched[1][i]["momentum_buffer"]) for i in alone[1])
    assert alone[2] == watched[2]


# --- what happens at a collapse


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


def state_of(trainer, pl_module):
    averages = [callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging)]
    return copy.deepcopy(
        {
            "weights": {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())},
            "moments": trainer.optimizers[0].state_dict()["state"],
            "averages": [callback._average_model.state_dict() for callback in averages],
        }
    )


def same_state(one, other):
    moments = [
        torch.equal(torch.as_tensor(one["moments"][place][name]), torch.as_tensor(value))
        for place, state in other["moments"].items()
        for name, value in state.items()
    ]
    averages = zip(one["averages"], other["averages"], strict=True)
    return identical(one["weights"], other["weights"]) and all(moments) and all(identical(a, b) for a, b in averages)


class States(pl.Callback):
    """Keeps everything after every epoch's last step, when the guard, which stands before, has acted."""

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            self.states.append(state_of(trainer, pl_module))


class Adam(Classifier):
    """Has moments, and a rate that falls with every step."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Armed(Adam):
    """Arms the trap by itself, in the middle of an epoch, and only once."""

    def __init__(self, step=None, **options):
        super().__init__(Trap(trained_net(**options)))
        self.step = step

    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == self.step:
            self.net.armed.fill_(1.0)


def collect(trainer, pl_module):
    states = next(callback for callback in trainer.callbacks if isinstance(callback, States)).states
    attack = next(callback for callback in trainer.callbacks if isinstance(callback, AdversarialTraining))
    guard = guard_of(trainer)
    return {
        "states": states,
        "end": state_of(trainer, pl_module),
        "history": guard.history,
        "factor": attack.step_factor,
        "rollbacks": guard.num_rollbacks,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "epochs": trainer.current_epoch,
    }


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


# --- resuming


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


# --- refusals


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
