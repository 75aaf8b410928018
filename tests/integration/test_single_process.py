"""One process, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from robustdist.attacks import PGD, LinearRamp, Piecewise
from robustdist.callbacks import AdversarialTraining
from robustdist.objectives import DAT, PGDAT

from .support import EPS, STEP_SIZE, Classifier, identical, loader, naive_training, seeded_net

FLAT = Piecewise([(0.0, 1.0)])


def weights_of(net):
    return {f"net.{name}": value for name, value in net.state_dict().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_pgdat_is_the_loop_that_one_writes_by_hand(launch, images, batch_norm, accumulate):
    x, y = images(160)
    net = seeded_net(batch_norm=batch_norm)
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)

    (trained,) = launch(
        Classifier(copy.deepcopy(net)),
        loader(x, y),
        callbacks=[AdversarialTraining(PGDAT(), attack)],
        accumulate_grad_batches=accumulate,
    )

    before = copy.deepcopy(net)
    naive_training(net, list(zip(x.split(8), y.split(8), strict=True)), clean_weight=0.0, accumulate=accumulate)
    assert identical(trained, weights_of(net))
    assert not identical(trained, weights_of(before))


def test_dat_is_the_loop_that_one_writes_by_hand(launch, images):
    x, y = images(160)
    net = seeded_net()
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)

    (trained,) = launch(
        Classifier(copy.deepcopy(net)),
        loader(x, y),
        callbacks=[AdversarialTraining(DAT(clean_weight=0.5), attack)],
    )

    naive_training(net, list(zip(x.split(8), y.split(8), strict=True)), clean_weight=0.5)
    assert identical(trained, weights_of(net))


def test_dat_without_clean_loss_is_pgdat(launch, images):
    x, y = images(160)
    net = seeded_net(batch_norm=True, dropout=0.5)
    results = []
    for objective in (PGDAT(), DAT(clean_weight=0.0), DAT(clean_weight=1.0)):
        torch.manual_seed(1)
        results += launch(
            Classifier(copy.deepcopy(net)),
            loader(x, y, shuffle=True),
            callbacks=[AdversarialTraining(objective, PGD(eps=EPS, steps=3, random_start=True))],
        )
    assert identical(results[0], results[1])
    assert not identical(results[0], results[2])


@pytest.mark.parametrize("scheduled", ["eps", "step_size"])
def test_the_schedule_reaches_the_images(launch, scheduled):
    x, y = torch.full((32, 1, 6, 6), 0.5), torch.arange(32) % 4
    ramp = LinearRamp(1.0)
    if scheduled == "eps":  # steps that are too long: only the radius limits them
        attack, schedules = PGD(eps=0.2, step_size=0.3, steps=2), {"eps_schedule": ramp, "step_size_schedule": FLAT}
    else:  # one step well inside the ball
        attack = PGD(eps=0.3, step_size=0.2, steps=1, random_start=False)
        schedules = {"step_size_schedule": ramp}
    module = Classifier()
    launch(module, loader(x, y), callbacks=[AdversarialTraining(PGDAT(), attack, **schedules)])
    radii = [float((seen - 0.5).abs().max()) for seen in module.seen]
    assert radii == pytest.approx([0.05, 0.1, 0.15, 0.2], abs=1e-6)
