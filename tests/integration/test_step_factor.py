"""A guard shrinks the step of the inner attack while training goes on."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from robustdist.attacks import PGD, LinearRamp, Piecewise
from robustdist.callbacks import AdversarialTraining
from robustdist.objectives import FGSMRS, NFGSM, PGDAT, FastBAT, GradAlign

from .support import EPS, Classifier, loader, seeded_net

FACTOR = 0.25


class Shrinking(pl.Callback):
    """Lowers the factor before the second batch, as a guard would."""

    def __init__(self, training):
        self.training = training

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            self.training.step_factor *= FACTOR


@pytest.mark.parametrize("step_size_schedule", [None, LinearRamp(1.0)])
def test_the_step_shrinks_and_the_radius_stays(launch, images, step_size_schedule):
    x, y = images(24)
    module = Classifier(seeded_net(), lr=0.0)
    attack = PGD(eps=0.25, step_size=EPS, steps=1, random_start=False)
    training = AdversarialTraining(attack=attack, step_size_schedule=step_size_schedule)
    launch(module, loader(x, y), callbacks=[Shrinking(training), training])

    scheduled = [1.0, 1.0, 1.0] if step_size_schedule is None else [1 / 3, 2 / 3, 1.0]
    moved = [float((seen - clean).abs().max()) for seen, clean in zip(module.seen, x.split(8), strict=True)]
    factors = (1.0, FACTOR, FACTOR)
    assert moved == pytest.approx([EPS * a * b for a, b in zip(scheduled, factors, strict=True)], rel=1e-5)
    assert training.scales() == (1.0, FACTOR)


@pytest.mark.parametrize("by", ["guard", "schedule"])
@pytest.mark.parametrize(
    "objective",
    [PGDAT(), FGSMRS(), NFGSM(noise=0.0), GradAlign(0.0), FastBAT(0.5), FastBAT(), FastBAT("paper")],
    ids=repr,
)
def test_every_step_rule_is_multiplied(launch, images, objective, by):
    x, y = images(8)
    x = 0.25 + x / 2  # no pixel at the edge of the box

    def moved(factor):
        module = Classifier(seeded_net(), lr=0.0)
        schedule = Piecewise([(0.0, factor)]) if by == "schedule" else None
        training = AdversarialTraining(objective, PGD(eps=EPS, steps=1), step_size_schedule=schedule)

        class Set(pl.Callback):
            def on_train_start(self, trainer, pl_module):
                training.step_factor = factor if by == "guard" else 1.0

        launch(module, loader(x, y), callbacks=[Set(), training])
        return module.seen[0] - x

    start, tiny, whole = moved(0.0), moved(1e-3), moved(1.0)
    # in proportion to the factor, from the point that the random start gives
    assert float((tiny - start).abs().max()) > 0
    assert float((tiny - start).abs().mean()) < 0.02 * float((whole - start).abs().mean())


@pytest.mark.parametrize(("eps", "constant"), [(16 / 255, 2000 / 255), (8 / 255, 5000 / 255)])
def test_the_steps_of_fast_bat_are_those_of_the_configured_radius(launch, images, eps, constant):
    found = []

    class Noting(FastBAT):
        def _step(self, grad, eps):
            found.append((eps, super()._step(grad, eps)))
            return found[-1][1]

    half, whole = Piecewise([(0.0, 0.5)]), Piecewise([(0.0, 1.0)])
    training = AdversarialTraining(Noting("paper"), PGD(eps=eps), eps_schedule=half, step_size_schedule=whole)
    launch(Classifier(), loader(*images(8)), callbacks=[training])
    assert found == [(eps, constant)] * 2


def test_the_factor_is_kept_in_checkpoints(launch, images, tmp_path):
    x, y = images(24)
    first = AdversarialTraining(attack=PGD(eps=EPS, steps=1))
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    launch(Classifier(), loader(x, y), callbacks=[Shrinking(first), first, checkpoint], enable_checkpointing=True)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    (state,) = (state for key, state in saved["callbacks"].items() if "Adversarial" in key)
    assert state["step_factor"] == FACTOR

    resumed = AdversarialTraining(attack=PGD(eps=EPS, steps=1))
    common = {"ckpt_path": tmp_path / "epoch=0.ckpt", "max_epochs": 2}
    launch(Classifier(), loader(x, y), callbacks=[resumed], **common)
    assert resumed.step_factor == FACTOR
    # a training that begins anew begins with the whole step
    launch(Classifier(), loader(x, y), callbacks=[resumed])
    assert resumed.step_factor == 1.0


def test_a_checkpoint_from_before_the_factor_loads():
    training = AdversarialTraining()
    training.step_factor = 0.5
    training.load_state_dict({"num_attacks": 7, "num_steps": 5})
    assert training.state_dict() == {"num_attacks": 7, "num_steps": 5, "started_at": None, "step_factor": 1.0}
