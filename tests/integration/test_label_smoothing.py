"""Smoothed targets in the outer loss alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT, FGSMRS, MART, NFGSM, PGDAT, TRADES, FastBAT, FreeAT, FreeLB, GradAlign
from robustdist.objectives.losses import smoothed

from .support import Classifier, Memory, identical, largest_difference, loader, seeded_net, shares

AMOUNT = 0.3

OBJECTIVES = [
    PGDAT(),
    DAT(0.5),
    TRADES(2.0),
    FGSMRS(),
    NFGSM(),
    GradAlign(),
    FastBAT(),
    FreeAT(2),
    FreeLB(2),
    AWP(gamma=0.01),
    AWP(TRADES(2.0), gamma=0.01),
]


class Smooth(Classifier):
    """What the user would write."""

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].detach().clone())
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=AMOUNT)


class Augmenting(Classifier):
    """Its step shows no logits of the inputs that it is given."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0].flip(-1)), batch[1])


def training(objective, **options):
    attack = PGD(eps=0.1, steps=2, step_size=0.05)
    return AdversarialTraining(copy.deepcopy(objective), attack, **options)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_it_is_the_label_smoothing_of_torch(launch, images, objective):
    x, y = images(32)
    results = []
    for module, options in ((Classifier(), {"label_smoothing": AMOUNT}), (Smooth(), {}), (Classifier(), {})):
        (state,) = launch(
            module, loader(x.double(), y), callbacks=[training(objective, **options)], precision="64-true"
        )
        results.append((state, module.seen))
    # the attack keeps to hard labels in both, so the first adversarial images are the same ones
    ours, theirs, hard = results
    assert largest_difference(ours[0], theirs[0]) < 1e-10
    assert largest_difference(ours[0], hard[0]) > 1e-3
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_the_formula_is_cross_entropy_to_smoothed_targets():
    logits, y = 3 * torch.randn(6, 5).double(), torch.tensor([0, 4, 2, 1, 1, 3])
    targets = (1 - AMOUNT) * F.one_hot(y, 5).double() + AMOUNT / 5
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    found = smoothed(F.cross_entropy(logits, y), logits, AMOUNT)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, F.cross_entropy(logits, y, label_smoothing=AMOUNT), rtol=1e-12, atol=0)
    huge = smoothed(torch.tensor(0.0), torch.tensor([[200.0, -200.0]]), AMOUNT)
    assert float(huge) == pytest.approx(AMOUNT * 200, rel=1e-6)


def test_the_users_own_logs_are_those_of_the_hard_loss(launch, images):
    class Logging(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            self.last = float(loss.detach())
            return {"loss": loss}

    module, memory = Logging(), Memory()
    launch(
        module,
        loader(*images(8)),
        callbacks=[training(PGDAT(), label_smoothing=AMOUNT)],
        logger=memory,
        log_every_n_steps=1,
    )
    assert memory.values("loss") == [pytest.approx(module.last)]


def test_a_step_that_hides_its_logits_is_smoothed_by_those_of_the_given_inputs(launch, images):
    x, y = images(8)
    (state,) = launch(Augmenting(), loader(x, y), callbacks=[training(PGDAT(), label_smoothing=AMOUNT)])
    net = seeded_net()
    attack = PGD(eps=0.1, steps=2, step_size=0.05)
    x_adv = attack(net, x, y, step=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    uniform = -net(x_adv).log_softmax(1).mean()
    ((1 - AMOUNT) * F.cross_entropy(net(x_adv.flip(-1)), y) + AMOUNT * uniform).backward()
    optimizer.step()
    expected = {f"net.{name}": value for name, value in net.state_dict().items()}
    assert largest_difference(state, expected) < 1e-6


def test_two_processes_train_as_one(launch, images):
    x, y = images(32)
    attack = PGD(eps=0.1, steps=2, random_start=False)
    options = {"label_smoothing": AMOUNT}
    one = launch(Classifier(), shares(x, y, 8), callbacks=[AdversarialTraining(attack=attack, **options)])
    two = launch(
        Classifier(),
        shares(x, y, 4),
        callbacks=[AdversarialTraining(attack=attack, **options)],
        processes=2,
        use_distributed_sampler=False,
    )
    assert identical(two[0], two[1])
    assert largest_difference(one[0], two[0]) < 1e-6


def test_none_is_bit_for_bit_what_it_was(launch, images):
    x, y = images(16)
    states = [
        launch(Classifier(), loader(x, y), callbacks=[training(PGDAT(), **options)])[0]
        for options in ({}, {"label_smoothing": 0.0})
    ]
    assert identical(*states)


@pytest.mark.parametrize("amount", [-0.1, 1.0, 2.0, float("nan")])
def test_an_amount_out_of_range_is_refused(amount):
    with pytest.raises(UsageError, match=r"label_smoothing=.* must be in"):
        AdversarialTraining(label_smoothing=amount)


@pytest.mark.parametrize("objective", [MART(), AWP(MART())], ids=repr)
def test_an_objective_that_replaces_the_loss_is_refused(objective):
    with pytest.raises(UsageError, match="label_smoothing mixes the module's own loss, which objective="):
        AdversarialTraining(objective, label_smoothing=0.1)


def test_manual_optimisation_and_other_targets_are_refused(launch, images):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(UsageError, match="label_smoothing needs a training_step that only returns its loss"):
        launch(Manual(), loader(*images(8)), callbacks=[training(PGDAT(), label_smoothing=0.1)])

    class Regression(Classifier):
        def training_step(self, batch, batch_idx):
            return (self(batch[0])[:, 0] - batch[1]).square().mean()

    x, y = images(8)
    with pytest.raises(UsageError, match="label_smoothing is about classification, set it to 0"):
        launch(
            Regression(),
            loader(x, y.float()),
            callbacks=[
                training(
                    PGDAT(),
                    label_smoothing=0.1,
                    attack_loss=lambda output, y: (output[:, 0] - y).square(),
                    input_key=0,
                    target_key=1,
                )
            ],
        )
