"""Batches that are trained on several times, one Trainer step each."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.objectives import AWP, FreeAT

from .support import Classifier, identical, loader, make_trainer, seeded_net, shares
from .test_precision import Overflowing, scaled

EPS = 0.125


def free(replays=3, norm="linf", **options):
    return AdversarialTraining(FreeAT(replays), PGD(eps=EPS, norm=norm), **options)


def by_hand(net, batches, replays, *, norm="linf", accumulate=1, lr=0.125, momentum=0.5):
    """Train ``net`` by the algorithm in plain torch; return the inputs it saw and the perturbation."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    delta = torch.zeros_like(batches[0][0])
    seen = []
    for number, (x, y) in enumerate((x, y) for x, y in batches for _ in range(replays)):
        here = (x + delta[: len(x)]).clamp(0, 1).requires_grad_()
        (F.cross_entropy(net(here), y) / accumulate).backward()
        if norm == "linf":
            delta[: len(x)] = (delta[: len(x)] + EPS * here.grad.sign()).clamp(-EPS, EPS)
        else:
            lengths = here.grad.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            moved = delta[: len(x)] + EPS * here.grad / lengths
            delta[: len(x)] = moved / (moved.flatten(1).norm(dim=1) / EPS).clamp(min=1).view(-1, 1, 1, 1)
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(here.detach())
    return seen, delta


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_the_algorithm(launch, images, norm, accumulate):
    x, y = images(96)
    batches = list(loader(x, y))
    module, net, callback = Classifier(), seeded_net(), free(3, norm)
    launch(module, loader(x, y), callbacks=[callback], accumulate_grad_batches=accumulate, max_epochs=1)

    # every third batch of the loader is taken
    seen, delta = by_hand(net, batches[::3], 3, norm=norm, accumulate=accumulate)
    assert len(module.seen) == len(seen) == 12
    for own, expected in zip(module.seen, seen, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(callback.objective.state_dict()["delta"], delta, rtol=0, atol=1e-6)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_groups_begin_anew_with_every_epoch_and_steps_are_updates(launch, images):
    x, y = images(40)
    x = x * 0 + torch.arange(5).repeat_interleave(8).view(-1, 1, 1, 1) / 8  # tells the batches
    given = []

    class Watching(Classifier):
        def training_step(self, batch, batch_idx):
            given.append((self.current_epoch, batch_idx, round(float(batch[0].mean()) * 8)))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Watching(lr=0.0)
    callback = AdversarialTraining(FreeAT(3), PGD(eps=1e-4), eps_schedule=LinearRamp(1.0))
    collect = lambda trainer, module: (  # noqa: E731
        trainer.global_step,
        trainer.optimizers[0].param_groups[0]["lr"],
        callback.state_dict(),
        float(trainer.callback_metrics["robust/eps"]),
    )
    ((steps, lr, state, eps),) = launch(module, loader(x, y), callbacks=[callback], max_epochs=2, collect=collect)

    # one batch later in the second epoch: in three epochs a fixed order hands out all batches
    groups = [[0, 0, 0, 3, 3], [0, 1, 1, 1, 4]]
    assert given == [(epoch, place, groups[epoch][place]) for epoch in range(2) for place in range(5)]
    assert steps == state["num_steps"] == state["num_attacks"] == 10
    assert lr == 0.5**10
    assert eps == pytest.approx(1e-4)


def test_a_step_costs_one_forward_and_one_backward(launch, images):
    class Counting(Classifier):
        forwards = backwards = 0

        def forward(self, x):
            self.forwards += 1
            return super().forward(x)

        def on_before_backward(self, loss):
            self.backwards += 1

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:  # the attack is tried once on the first batch
                self.forwards = self.backwards = 0

    module = Counting()
    launch(module, loader(*images(64)), callbacks=[free(2)])
    assert (module.forwards, module.backwards) == (7, 7)


def test_the_held_batch_is_let_go(launch, images):
    callback = free(4)
    launch(Classifier(), loader(*images(24)), callbacks=[callback])
    assert callback._replayed is None


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_has_the_perturbation_of_every_process(launch, tmp_path, images, processes):
    x, y = images(32)
    common = {"processes": processes, "max_epochs": 2, "use_distributed_sampler": False, "enable_checkpointing": True}

    def collect(trainer, module):
        delta = trainer.callbacks[0].objective.state_dict()["delta"]
        return module.state_dict(), delta, module.seen

    def callbacks(folder):
        return [free(2), ModelCheckpoint(tmp_path / folder, filename="{epoch}", save_top_k=-1)]

    data = shares(x, y, 8 // processes)
    straight = launch(Classifier(), data, callbacks=callbacks("straight"), collect=collect, **common)
    checkpoint = tmp_path / "straight" / "epoch=0.ckpt"
    resumed = launch(
        Classifier(seeded_net(5)), data, callbacks=callbacks("on"), collect=collect, ckpt_path=checkpoint, **common
    )
    for whole, half in zip(straight, resumed, strict=True):
        assert identical(whole[0], half[0])
        assert torch.equal(whole[1], half[1])
        assert torch.equal(torch.stack(whole[2][4:]), torch.stack(half[2]))
    assert not torch.equal(straight[0][1], straight[-1][1]) or processes == 1

    saved = torch.load(checkpoint, weights_only=True)
    (state,) = (state for key, state in saved["callbacks"].items() if "Adversarial" in key)
    assert [part["delta"].shape for part in state["objective"]] == [(8 // processes, 1, 6, 6)] * processes
    Classifier().load_state_dict(saved["state_dict"], strict=True)


def test_another_number_of_processes_starts_without_memory(launch, tmp_path, images):
    x, y = images(16)
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    launch(Classifier(), shares(x, y, 4), callbacks=[free(2), checkpoint], processes=2, enable_checkpointing=True)
    module = Classifier()
    with pytest.warns(RobustDistWarning, match="of 2 processes and this run has 1: FreeAT starts without its memory"):
        launch(module, loader(x, y), callbacks=[free(2)], ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=2)
    assert torch.equal(module.seen[0], x[:8])


def test_a_new_training_starts_from_no_perturbation(launch, images):
    x, y = images(16)
    callback = free(2)
    runs = []
    for _ in range(2):
        module = Classifier()
        launch(module, loader(x, y), callbacks=[callback])
        runs.append(torch.stack(module.seen))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0][0], x[:8])


def test_steps_that_a_scaler_skips_move_nothing(launch, images):
    x, y = images(48)
    deltas = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            deltas.append(callback.objective.state_dict()["delta"])

    module, callback = Overflowing(seeded_net()), free(2)
    launch(module, loader(x, y), plugins=scaled(), callbacks=[callback, Watch()])
    assert [float(delta.abs().max()) for delta in deltas] == [0, 0, EPS, EPS, EPS, EPS]
    assert torch.equal(module.seen[0], module.seen[1])  # replayed, with nothing moved
    assert all(bool(torch.isfinite(delta).all()) for delta in deltas)


@pytest.mark.parametrize("objective", [FreeAT(), FreeAT(1), AWP(FreeAT(), gamma=0.0)], ids=repr)
def test_manual_optimisation_is_refused(launch, images, objective):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    module = Manual()
    with pytest.raises(UsageError, match="reads the input gradient from Lightning's own backward pass"):
        launch(module, loader(*images(8)), callbacks=[AdversarialTraining(objective)])
    assert module.seen == []


def test_the_user_is_told_how_many_epochs_a_pass_takes(images, caplog):
    trainer = make_trainer(callbacks=[free(4)], max_epochs=1)
    with caplog.at_level("INFO"):
        trainer.fit(Classifier(), loader(*images(8)))
    assert "FreeAT makes 4 steps on every batch it takes and drops the 3 that follow" in caplog.text
