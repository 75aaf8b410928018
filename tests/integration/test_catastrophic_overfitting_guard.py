"""CatastrophicOverfittingGuard: what it measures, and that it disturbs nothing."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch

from robustdist.attacks import FGSM, PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard
from robustdist.objectives import DAT, FGSMRS, NFGSM, TRADES
from tests.integration.guard_support import EPS, history, module, strong, training

from .support import Classifier, Memory, identical, loader, naive_pgd, seeded_net, shares, trained_net


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


def test_checks_where_several_optimisers_count(launch, images):
    class Alternating(Classifier):
        """Two optimisers per batch: Lightning's counter moves by two."""

        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return loss

        def configure_optimizers(self):
            parts = (self.net.head.parameters(), self.net.conv.parameters())
            return [torch.optim.SGD(part, lr=0.0) for part in parts]

    x, y = images(48)
    guard = CatastrophicOverfittingGuard(num_samples=16, every_n_steps=5)
    (entries,) = launch(Alternating(), loader(x, y), callbacks=[training(), guard], collect=history, max_epochs=2)
    # twelve batches of four or so: the first batch end at or after 5, 10, 15, ...
    assert [entry["step"] for entry in entries] == [6, 10, 16, 20, 26, 30][: len(entries)]
    assert len(entries) >= 2


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
