"""Number formats, loss scaling and steps that a scaler skips."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler

from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.objectives import DAT, PGDAT, FastBAT, GradAlign

from .support import Classifier, Memory, loader, seeded_net

BUDGET = 8 / 255


class Overflowing(Classifier):
    """Has an infinite loss in its first two batches."""

    def __init__(self, net=None, fused=False):
        super().__init__(net)
        self.fused = fused

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx < 2 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125, fused=self.fused)


class Trace(pl.Callback):
    def __init__(self):
        self.eps: list[float] = []
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.eps.append(float(trainer.callback_metrics["robust/eps"]))
        self.weights.append(pl_module.net.head.weight.detach().clone())


class StopAfter(pl.Callback):
    """Ends a training early, as a time limit does."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


def scaled(init_scale=2.0**16):
    # the string "16-mixed" becomes bfloat16 on a CPU
    return [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=init_scale))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("objective", [PGDAT(), DAT(1.0)])
def test_skipped_steps_do_not_advance_the_schedule(launch, images, fused, objective):
    x, y = images(48)
    net = seeded_net()
    start = net.head.weight.detach().clone()
    trace = Trace()
    callback = AdversarialTraining(objective, PGD(eps=0.25, steps=2), eps_schedule=LinearRamp(1.0))
    (steps,) = launch(
        Overflowing(net, fused),
        loader(x, y),
        plugins=scaled(),
        callbacks=[callback, trace],
        collect=lambda trainer, module: trainer.global_step,
    )

    assert steps == 6  # Lightning counts the skipped ones
    assert torch.equal(trace.weights[0], start)
    assert torch.equal(trace.weights[1], start)
    moved = [not torch.equal(*pair) for pair in zip(trace.weights[1:], trace.weights[2:], strict=False)]
    assert moved == [True] * 4
    assert trace.eps == pytest.approx([0.25 * step / 6 for step in (1, 1, 1, 2, 3, 4)])
    assert callback.state_dict() == {"num_attacks": 6, "num_steps": 4, "started_at": 0, "step_factor": 1.0}


def test_a_break_does_not_shift_the_schedule_of_a_training_with_skipped_steps(launch, images, tmp_path):
    def train(**options):
        trace = Trace()
        callback = AdversarialTraining(attack=PGD(eps=0.25, steps=2), eps_schedule=LinearRamp(1.0))
        module = Overflowing(seeded_net())
        launch(
            module,
            loader(*images(24)),
            plugins=scaled(),
            callbacks=[callback, trace, *options.pop("more", ())],
            **options,
        )
        return trace.eps

    whole = train(max_epochs=3)
    saving = ModelCheckpoint(tmp_path, filename="half", every_n_epochs=2)
    first = train(max_epochs=3, limit_train_batches=3, more=[saving, StopAfter(2)], enable_checkpointing=True)
    rest = train(max_epochs=3, ckpt_path=tmp_path / "half.ckpt")
    # two of every three steps are skipped
    assert whole == pytest.approx([0.25 * step / 9 for step in (1, 1, 1, 2, 2, 2, 3, 3, 3)])
    assert first + rest == whole


@pytest.mark.parametrize("init_scale", [1.0, 2.0**16, 2.0**20])
def test_the_attack_follows_the_gradient_at_every_loss_scale(launch, images, init_scale):
    # at 2**20 the scaled mean loss of 64 images still has a finite gradient in half precision
    x, y = images(64)
    attack = PGD(eps=1 / 16, step_size=1 / 16, steps=1, random_start=False)
    moves = []
    for plugins in ([], scaled(init_scale)):
        module = Classifier(seeded_net(), lr=0.0)
        launch(module, loader(x, y, batch_size=64), callbacks=[AdversarialTraining(attack=attack)], plugins=plugins)
        moves.append((module.seen[0] - x).sign())
    assert moves[0].any()
    assert float((moves[0] == moves[1]).float().mean()) > 0.99


def test_weights_train_in_half_precision(launch, images):
    x, y = images(64)
    net = seeded_net()
    start = net.head.weight.detach().clone()
    launch(Classifier(net), loader(x, y), plugins=scaled(2.0), callbacks=[AdversarialTraining(DAT(1.0))])
    assert torch.isfinite(net.head.weight).all()
    assert not torch.equal(net.head.weight, start)


@pytest.mark.parametrize(
    ("precision", "attack_precision"),
    [
        ("32-true", "inherit"),
        ("32-true", "bf16"),
        ("bf16-mixed", "inherit"),
        ("bf16-mixed", "bf16"),
        ("bf16-mixed", "32"),
        ("64-true", "inherit"),
        ("bf16-true", "inherit"),
    ],
)
def test_the_budget_holds_in_every_precision(launch, images, precision, attack_precision):
    x, y = images(64)

    class Both(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.given = batch[0]
            return batch

        def training_step(self, batch, batch_idx):
            # in double: the difference itself must not round
            self.deltas.append(batch[0].double() - self.given.double())
            self.dtype_seen = batch[0].dtype
            return super().training_step(batch, batch_idx)

    module = Both()
    module.deltas = []
    attack = PGD(eps="8/255", steps=5, random_start=True)
    (result,) = launch(
        module,
        loader(x, y),
        loader(x, y),
        precision=precision,
        callbacks=[
            RobustEvaluation({"pgd": attack}),
            AdversarialTraining(DAT(0.0), attack, precision=attack_precision),
        ],
        collect=lambda trainer, module: trainer.callbacks[0].result,
    )
    delta = torch.cat(module.deltas).abs()
    rounding = {"32-true": 1e-7, "bf16-mixed": 1e-7, "64-true": 1e-15, "bf16-true": 0.0}[precision]
    assert 0.9 * BUDGET < float(delta.max()) <= BUDGET + rounding
    dtypes = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
    assert module.dtype_seen == dtypes.get(precision, torch.float32)
    assert result.checks["budget"].passed
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_the_attack_in_bfloat16_moves_nearly_the_same_pixels(launch, images):
    x, y = images(64)
    attack = PGD(eps=1 / 16, step_size=1 / 16, steps=1, random_start=False)
    net = seeded_net()
    moves = {}
    for precision in ("32", "bf16"):
        module = Classifier(copy.deepcopy(net))
        launch(
            module,
            loader(x, y, batch_size=64),
            callbacks=[AdversarialTraining(attack=attack, precision=precision)],
        )
        moves[precision] = (module.seen[0] - x).sign()
    x_adv = x.clone().requires_grad_(True)
    F.cross_entropy(net(x_adv), y, reduction="sum").backward()
    # pixels at the edge of the range cannot move outwards
    free = ((x > 1 / 16) & (x < 15 / 16)).float()
    assert torch.equal(moves["32"] * free, x_adv.grad.sign() * free)
    same = float((moves["32"] == moves["bf16"]).float().mean())
    assert 0.9 < same < 1.0  # less than 1, or it did not run in bfloat16


class Faint(Classifier):
    """Has input gradients that vanish in half precision unless the loss is scaled."""

    def forward(self, x):
        return self.net(x).float() * 1e-8


@pytest.mark.parametrize(
    ("objective", "keys"),
    [(GradAlign(), ["robust/misalignment"]), (FastBAT(), ["fast_bat/interior_fraction", "fast_bat/ig_ratio"])],
)
def test_gradients_inside_an_objective_are_scaled_like_those_of_the_attack(launch, images, objective, keys):
    x, y = images(32)
    logs, moves = [], []
    for plugins in ([], scaled()):
        module, logger = Faint(seeded_net(), lr=0.0), Memory()
        launch(
            module,
            loader(x, y, batch_size=32),
            callbacks=[AdversarialTraining(objective, PGD(eps=1 / 16))],
            plugins=plugins,
            logger=logger,
            log_every_n_steps=1,
        )
        logs.append([logger.values(key)[0] for key in keys])
        moves.append((module.seen[0] - x).sign())
    assert min(logs[0]) > 1e-9
    assert logs[1] == pytest.approx(logs[0], rel=0.1)
    assert float((moves[0] == moves[1]).float().mean()) > 0.95
