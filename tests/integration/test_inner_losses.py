"""Attacks on a loss of the module's own: ``attack_step`` and the training step itself."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

from robustdist.attacks import FGSM, PGD, TorchAttack
from robustdist.callbacks import AdversarialTraining
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT, FGSMRS, NFGSM, PGDAT, TRADES, FastBAT, FreeAT, GradAlign

from .support import EPS, STEP_SIZE, Classifier, identical, largest_difference, loader, seeded_net, shares
from .test_metrics import Measuring

WEIGHTS = torch.tensor([1.0, 3.0])


def labels(y):
    """Two labels per image: bottom row, right column."""
    return torch.stack([y // 2, y % 2], 1).float()


class MultiLabel(Classifier):
    """Binary cross-entropy over the first two outputs; keeps the inputs that it is trained on."""

    def training_step(self, batch, batch_idx):
        if self.training:  # the attack works in eval mode
            self.seen.append(batch[0].detach().clone())
        return F.binary_cross_entropy_with_logits(self(batch[0])[:, :2], batch[1], WEIGHTS)


class WithStep(MultiLabel):
    """Says what an attack shall increase."""

    reduction = "none"

    def attack_step(self, batch):
        x, y = batch
        values = F.binary_cross_entropy_with_logits(self(x)[:, :2], y, WEIGHTS, reduction="none").mean(1)
        return values.mean() if self.reduction == "mean" else values


def naive_attack(net, x, y, steps=3):
    """Signed steps up the loss of every image, written out."""
    training = net.training
    net.eval()
    x_adv = x.clone()
    for _ in range(steps):
        x_adv.requires_grad_(True)
        p = net(x_adv)[:, :2].sigmoid()
        value = -(WEIGHTS * (y * p.log() + (1 - y) * (1 - p).log())).sum()
        step = torch.autograd.grad(value, x_adv)[0].sign()
        x_adv = torch.maximum(torch.minimum(x_adv.detach() + STEP_SIZE * step, x + EPS), x - EPS).clamp(0, 1)
    net.train(training)
    return x_adv


def naive_training(net, batches):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    seen = []
    for x, y in batches:
        seen.append(naive_attack(net, x, y))
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(net(seen[-1])[:, :2], y, WEIGHTS).backward()
        optimizer.step()
    return seen


def training(objective=None, attack_loss=None, **options):
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)
    keys = {"input_key": 0, "target_key": 1}  # both are floating-point tensors
    return AdversarialTraining(objective, attack, attack_loss=attack_loss, **keys, **options)


def mean_step():
    module = WithStep()
    module.reduction = "mean"
    return module


WAYS = {
    "training_step": (MultiLabel, "training_step"),
    "attack_step, a value per image": (WithStep, None),
    "attack_step, their mean": (mean_step, None),
    "a function": (MultiLabel, lambda logits, y: F.binary_cross_entropy_with_logits(logits[:, :2], y, WEIGHTS)),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_the_algorithm(launch, images, way):
    make, attack_loss = WAYS[way]
    x, y = images(32)
    module, net = make(), seeded_net()
    launch(module, loader(x, labels(y)), callbacks=[training(attack_loss=attack_loss)])

    seen = naive_training(net, list(loader(x, labels(y))))
    assert len(module.seen) == len(seen) == 4
    assert all(torch.equal(own, expected) for own, expected in zip(module.seen, seen, strict=True))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(launch, images, way):
    make, attack_loss = WAYS[way]
    x, y = images(32)
    one = launch(make(), shares(x, labels(y), 8), callbacks=[training(attack_loss=attack_loss)])
    two = launch(
        make(),
        shares(x, labels(y), 4),
        callbacks=[training(attack_loss=attack_loss)],
        processes=2,
        use_distributed_sampler=False,
    )
    assert identical(two[0], two[1])
    assert largest_difference(one[0], two[0]) < 1e-6


@pytest.mark.parametrize("attack_loss", ["training_step", None])
def test_who_shares_the_batch_does_not_show(launch, images, attack_loss):
    x, y = images(8)
    seen = []
    for batch_size in (8, 2):
        module = mean_step()
        module.lr = 0.0
        launch(module, loader(x, labels(y), batch_size=batch_size), callbacks=[training(attack_loss=attack_loss)])
        seen.append(torch.cat(module.seen))
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("objective", "passes"), [(PGDAT(), 1), (DAT(1.0), 2)])
def test_the_steps_of_the_attack_leave_no_logs_and_no_counts(launch, images, processes, objective, passes):
    x, y = images(64)

    def collect(trainer, module):
        return module.state, len(module.losses), set(trainer.callback_metrics)

    results = launch(
        Measuring(),
        loader(x, y, batch_size=8 // processes),
        processes=processes,
        callbacks=[training(copy.deepcopy(objective), "training_step")],
        collect=collect,
    )
    for state, calls, keys in results:
        # three steps of the attack, the outer passes, and three more when the first batch is tried
        assert calls == 8 * (3 + passes) + 3
        assert state["updates"] == [8] * 5
        assert state["steps"] == 8 * processes
        assert {"train/loss", "train/acc", "train/twice"} <= keys


def test_buffers_modes_and_random_states_are_those_of_ordinary_training(launch, images):
    # with nothing to move, all that could differ are side effects of the steps of the attack
    x, y = images(32)
    results = []
    for eps in (None, 0.0, 1e-12):
        torch.manual_seed(7)
        module = Classifier(seeded_net(batch_norm=True, dropout=0.5))
        attack = PGD(eps=eps or 0.0, step_size=0.0)
        callbacks = [] if eps is None else [AdversarialTraining(attack=attack, attack_loss="training_step")]
        torch.manual_seed(7)
        (state,) = launch(module, loader(x, y), callbacks=callbacks)
        results.append((state, torch.rand(3)))
    for state, draw in results[1:]:
        assert largest_difference(state, results[0][0]) < 1e-6
        assert torch.equal(draw, results[0][1])
    assert int(results[2][0]["net.norm.num_batches_tracked"]) == 4


@pytest.mark.parametrize(
    "objective",
    [PGDAT(), DAT(0.5), FGSMRS(), NFGSM(), FreeAT(2), FastBAT(), GradAlign(), AWP(gamma=0.01), AWP(FGSMRS())],
    ids=repr,
)
@pytest.mark.parametrize("make", [WithStep, MultiLabel])
def test_every_objective_that_attacks_targets_takes_them(launch, images, objective, make):
    x, y = images(32)
    module = make()
    start = copy.deepcopy(module.state_dict())
    attack_loss = None if make is WithStep else "training_step"
    launch(module, loader(x, labels(y)), callbacks=[training(copy.deepcopy(objective), attack_loss)])
    assert all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())
    assert not torch.equal(module.state_dict()["net.head.weight"], start["net.head.weight"])


def test_a_step_that_returns_a_mapping_is_attacked_by_its_loss(launch, images):
    class Mapping(MultiLabel):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "extra": 1}

    x, y = images(16)
    module, plain = Mapping(), MultiLabel()
    for one in (module, plain):
        launch(one, loader(x, labels(y)), callbacks=[training(attack_loss="training_step")])
    assert all(torch.equal(one, other) for one, other in zip(module.seen, plain.seen, strict=True))


class Loud(Classifier):
    """Its attack_step must not be called."""

    def attack_step(self, batch):
        raise ArithmeticError("called")


@pytest.mark.parametrize(("objective", "attack_loss"), [(PGDAT(), "ce"), (PGDAT(), "margin"), (TRADES(), None)])
def test_a_named_loss_and_an_inner_problem_of_the_objective_come_first(launch, images, objective, attack_loss):
    launch(Loud(), loader(*images(8)), callbacks=[training(objective, attack_loss)])
    with pytest.raises(ArithmeticError, match="called"):
        launch(Loud(), loader(*images(8)), callbacks=[training(PGDAT())])


def test_a_resumed_run_is_the_whole_one(launch, tmp_path, images):
    x, y = images(16)
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    common = {"max_epochs": 2}
    (whole,) = launch(
        WithStep(), loader(x, labels(y)), callbacks=[training(), checkpoint], enable_checkpointing=True, **common
    )
    (half,) = launch(
        WithStep(seeded_net(3)),
        loader(x, labels(y)),
        callbacks=[training()],
        ckpt_path=tmp_path / "epoch=0.ckpt",
        **common,
    )
    assert identical(whole, half)


def test_combinations_that_cannot_work_are_refused(launch, images):
    with pytest.raises(UsageError, match="does not go with objective=TRADES, whose attack follows its own divergence"):
        training(TRADES(), "training_step")
    with pytest.raises(UsageError, match="has a loss of its own"):
        AdversarialTraining(attack=TorchAttack("PGD"), attack_loss="training_step")

    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    module = Manual()
    with pytest.raises(UsageError, match=r"attack_loss='training_step' needs a training_step that only returns"):
        launch(module, loader(*images(8)), callbacks=[training(attack_loss="training_step")])
    assert module.seen == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_without_a_loss_cannot_be_attacked(launch, images, processes):
    class Silent(Classifier):
        def attack_step(self, batch):
            return None

    with pytest.raises(Exception, match="the step that the attack follows returned no loss"):
        launch(Silent(), loader(*images(16)), callbacks=[training()], processes=processes)


def test_the_attack_of_the_user_is_left_as_it_was(launch, images):
    attack = FGSM(eps=EPS)
    callback = AdversarialTraining(attack=attack, input_key=0, target_key=1)
    x, y = images(8)
    launch(WithStep(), loader(x, labels(y)), callbacks=[callback])
    assert attack.attack_loss == callback.attack.attack_loss == "ce"
