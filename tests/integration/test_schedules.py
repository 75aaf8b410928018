"""Ramps reach their end in every kind of loop, and monitors are warned about stale values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.errors import RobustDistWarning

from .support import EPS, Classifier, Memory, loader, make_trainer

RAMP = LinearRamp(share=0.5)


def training(**options):
    return AdversarialTraining(attack=PGD(eps=EPS, steps=1), eps_schedule=RAMP, **options)


def radii(memory):
    return [round(value / EPS, 6) for value in memory.values("robust/eps")]


class Manual(Classifier):
    """Steps every fourth batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()


def fit(module, x, y, *callbacks, ckpt_path=None, **options):
    memory = Memory()
    trainer = make_trainer(callbacks=list(callbacks), logger=memory, log_every_n_steps=1, **options)
    trainer.fit(module, loader(x, y, batch_size=4), ckpt_path=ckpt_path)
    return memory, trainer


def test_a_ramp_follows_optimiser_steps_and_reaches_the_radius(images):
    memory, _ = fit(Classifier(), *images(32), training(), accumulate_grad_batches=2)
    assert radii(memory) == [0.5, 1.0, 1.0, 1.0]  # four steps, logged once each


def test_a_ramp_follows_batches_in_manual_optimisation(images):
    memory, _ = fit(Manual(), *images(32), training())
    # Lightning logs where its step counter moves, so read the radius of the last batches
    assert radii(memory)[-1] == 1.0
    assert radii(memory)[0] == 0.25


def test_a_ramp_starts_where_the_callback_first_takes_part(images, tmp_path):
    x, y = images(32)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(Classifier(), x, y, checkpoint, enable_checkpointing=True)
    # an ordinary run of eight steps, continued adversarially for eight more
    memory, _ = fit(Classifier(), x, y, training(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert radii(memory) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_second_fit_ramps_again(images):
    x, y = images(32)
    callback = training()
    first, _ = fit(Classifier(), x, y, callback)
    second, _ = fit(Classifier(), x, y, callback)
    assert radii(first) == radii(second) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_without_a_known_length_the_radius_is_whole():
    assert training().scales() == (1.0, 1.0)


def test_early_stopping_on_values_that_are_rarely_measured_is_said(images):
    x, y = images(8)
    stopping = EarlyStopping(monitor="robust/acc", mode="max", patience=3)
    evaluation = RobustEvaluation({"pgd": PGD(eps=EPS, steps=1)}, every_n_epochs=5)
    trainer = make_trainer(callbacks=[evaluation, stopping], max_epochs=1)
    with pytest.warns(RobustDistWarning, match="every_n_epochs=5 is less often: raise patience or lower"):
        trainer.fit(Classifier(), loader(x, y), loader(x, y))


def test_an_objective_may_use_logits_alone_or_the_loss_twice(images):
    from robustdist.objectives import Objective

    class LogitsOnly(Objective):
        def compute(self, context):
            return F.cross_entropy(context.logits(context.attack(context.x, context.y)), context.y)

    class Twice(Objective):
        needs_second_pass = True

        def compute(self, context):
            self.values = context.loss(context.x), context.loss(torch.zeros_like(context.x))
            return self.values[0] + self.values[1]

    x, y = images(8)
    module, twice = Classifier(), Twice()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit(module, x, y, AdversarialTraining(LogitsOnly(), PGD(eps=EPS, steps=1)))
    assert module.seen == []
    assert any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    fit(Classifier(), x, y, AdversarialTraining(twice, PGD(eps=EPS, steps=1)))
    assert twice.values[0] != twice.values[1]
