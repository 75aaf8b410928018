"""Weights and gradients under accumulation and several processes, against plain torch."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from robustdist.attacks import PGD, TorchAttack
from robustdist.callbacks import AdversarialTraining
from robustdist.objectives import DAT, PGDAT

from .support import (
    EPS,
    STEP_SIZE,
    Classifier,
    identical,
    largest_difference,
    naive_training,
    run,
    seeded_net,
    shares,
)

OPTIONS = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
}


def adversarial(objective, **options):
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)
    return AdversarialTraining(objective, attack, **options)


class WithSpare(Classifier):
    """Has weights that no loss uses."""

    def __init__(self, net: nn.Module):
        super().__init__(net)
        self.spare = nn.Linear(3, 2)


def reference(net, batches, accumulate):
    net = copy.deepcopy(net).double()
    naive_training(net, [(x.double(), y) for x, y in batches], clean_weight=1.0, accumulate=accumulate)
    return {f"net.{name}": value for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ("plain", 1),
        ("plain", 2),
        ("find_unused", 1),
        ("find_unused", 2),
        ("static_graph", 1),  # DDP itself does not support it with accumulation
        ("bucket_view", 2),
    ],
)
def test_two_processes_train_as_one_and_as_plain_torch(launch, images, options, accumulate):
    num_steps, batch_size = 20, 4
    x, y = images(num_steps * accumulate * 2 * batch_size)
    net = seeded_net()
    expected = reference(net, list(zip(x.split(2 * batch_size), y.split(2 * batch_size), strict=True)), accumulate)
    common = {"precision": "64-true", "accumulate_grad_batches": accumulate, "use_distributed_sampler": False}

    def collect(trainer, module):
        return {"steps": trainer.global_step, "weights": module.state_dict()}

    (single,) = launch(
        Classifier(copy.deepcopy(net)),
        shares(x, y, 2 * batch_size),
        callbacks=[adversarial(DAT(clean_weight=1.0))],
        collect=collect,
        **common,
    )
    ranks = launch(
        Classifier(copy.deepcopy(net)),
        shares(x, y, batch_size),
        processes=2,
        strategy=DDPStrategy(start_method="fork", **OPTIONS[options]),
        callbacks=[adversarial(DAT(clean_weight=1.0))],
        collect=collect,
        **common,
    )

    assert [result["steps"] for result in (single, *ranks)] == [num_steps] * 3
    # far from where it began, so that the tolerance below says something
    assert largest_difference(single["weights"], {f"net.{k}": v for k, v in net.state_dict().items()}) > 1e-2
    for result in (single, *ranks):
        assert largest_difference(result["weights"], expected) < 1e-10
    assert identical(ranks[0]["weights"], ranks[1]["weights"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_without_use_stay_and_the_others_train(launch, images, accumulate):
    x, y = images(20 * accumulate * 8)
    net = seeded_net()
    module = WithSpare(copy.deepcopy(net))
    spare = module.spare.weight.detach().double().clone()
    expected = reference(net, list(zip(x.split(8), y.split(8), strict=True)), accumulate)

    ranks = launch(
        module,
        shares(x, y, 4),
        processes=2,
        strategy=DDPStrategy(start_method="fork", find_unused_parameters=True),
        callbacks=[adversarial(DAT(clean_weight=1.0))],
        precision="64-true",
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )

    for result in ranks:
        assert torch.equal(result["spare.weight"], spare)
        assert largest_difference({name: result[name] for name in expected}, expected) < 1e-10


class Gradients(pl.Callback):
    """Keeps the gradients that the optimiser is about to use."""

    def __init__(self):
        self.found: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found.append({name: p.grad.clone() for name, p in pl_module.named_parameters()})


@pytest.mark.parametrize("name", ["PGD", "CW"])
@pytest.mark.parametrize("objective", [PGDAT(), DAT(clean_weight=0.5)], ids=["PGDAT", "DAT"])
def test_the_attack_leaves_no_gradient_on_the_weights(tmp_path, images, require, name, objective):
    if name == "CW":
        require("torchattacks")  # the one of its attacks that calls backward() on a loss of the weights
    attack = PGD(eps=EPS, steps=3) if name == "PGD" else TorchAttack("CW", c=10.0, steps=5, lr=0.2)
    x, y = images(32)
    net = seeded_net()
    gradients = Gradients()

    def collect(trainer, module):
        return {"gradients": gradients.found, "seen": module.seen}

    ranks = run(
        tmp_path,
        Classifier(copy.deepcopy(net), lr=0.0),
        shares(x, y, 4),
        processes=2,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        callbacks=[AdversarialTraining(objective, attack), gradients],
        collect=collect,
    )

    passes = 2 if objective.needs_second_pass else 1
    clean_weight = getattr(objective, "clean_weight", 0.0)
    moved = 0
    for step in range(2):
        net.zero_grad()
        for rank, result in enumerate(ranks):
            for batch in (2 * step, 2 * step + 1):
                first = batch * 8 + rank * 4
                rows = slice(first, first + 4)
                x_adv = result["seen"][batch * passes]
                moved += int((x_adv != x[rows]).any())
                loss = F.cross_entropy(net(x_adv), y[rows])
                loss = loss + clean_weight * F.cross_entropy(net(x[rows]), y[rows])
                (loss / 4).backward()  # two processes, two micro-batches
        for result in ranks:
            for key, parameter in net.named_parameters():
                torch.testing.assert_close(result["gradients"][step][f"net.{key}"], parameter.grad)
    assert moved >= 4  # CW leaves images alone that are wrong already
