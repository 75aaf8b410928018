"""The published objectives under a Trainer."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.errors import UsageError
from robustdist.objectives import (
    AWP,
    DAT,
    FGSMRS,
    MART,
    NFGSM,
    PGDAT,
    TRADES,
    ConAdv,
    FastBAT,
    FreeAT,
    FreeLB,
    FriendlyAT,
    GradAlign,
)

from .support import Classifier, identical, loader, seeded_net
from .test_metrics import Measuring
from .test_precision import Overflowing, scaled

STEPS = 3

OBJECTIVES = [
    TRADES(),
    MART(),
    FGSMRS(),
    NFGSM(),
    GradAlign(),
    FastBAT(),
    FastBAT(implicit_weight=0.0),
    FreeAT(2),
    FriendlyAT([(0.0, 0), (0.5, 1)]),
    ConAdv(),
    AWP(),
    AWP(TRADES(), gamma=0.005),
    AWP(gamma=0.0),
]
# one per way to take logits and losses from the user's step
PASSES = [
    PGDAT(),
    DAT(),
    TRADES(),
    MART(),
    GradAlign(),
    FastBAT(),
    FreeAT(2),
    FreeLB(2),
    ConAdv(),
    AWP(TRADES()),
    AWP(DAT()),
]
WITH_AWP = [objective for objective in OBJECTIVES if isinstance(objective, AWP)]


def adversarial(objective, **options):
    return AdversarialTraining(copy.deepcopy(objective), PGD(eps=0.125, steps=STEPS), **options)


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


class TrueWeights(pl.Callback):
    """Notes whether the weights were moved before the backward pass and whether they are back before the step."""

    def __init__(self):
        self.moved: list[bool] = []
        self.back: list[bool] = []
        self.gradients: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = snapshot(pl_module)

    def on_before_backward(self, trainer, pl_module, loss):
        self.moved.append(not identical(snapshot(pl_module), self.before))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.back.append(identical(snapshot(pl_module), self.before))
        # the bias before batch norm has none but rounding
        used = [p for name, p in pl_module.named_parameters() if name != "net.conv.bias"]
        self.gradients.append(all(float(p.grad.abs().sum()) > 0 for p in used))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_two_processes_accumulate_and_clip(launch, images, objective):
    net = seeded_net(batch_norm=True)
    start = {f"net.{name}": value.clone() for name, value in net.named_parameters()}
    weights = TrueWeights()

    def collect(trainer, module):
        logged = {key for key in trainer.callback_metrics if "/" in key}
        return snapshot(module), trainer.global_step, weights.moved, weights.back, weights.gradients, logged

    ranks = launch(
        Classifier(net),
        loader(*images(64), batch_size=4),
        processes=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[weights, adversarial(objective)],
        collect=collect,
    )

    assert identical(ranks[0][0], ranks[1][0])
    for trained, steps, moved, back, gradients, logged in ranks:
        assert steps == 4
        assert moved == [isinstance(objective, AWP) and objective.gamma > 0] * 8
        assert back == [True] * 4
        assert gradients == [True] * 4
        assert all(bool(torch.isfinite(value).all()) for value in trained.values())
        assert not torch.equal(trained["net.head.weight"], start["net.head.weight"])
        inner = objective.base if isinstance(objective, AWP) else objective
        reports = {
            TRADES: {"robust/divergence"},
            GradAlign: {"robust/misalignment"},
            FriendlyAT: {"robust/mean_steps"},
            ConAdv: {"robust/clean_loss", "robust/adv_loss"},
            FastBAT: {"fast_bat/interior_fraction", "fast_bat/ig_ratio"},
        }
        expected = reports.get(type(inner), set()) if getattr(inner, "implicit_weight", 1) else set()
        assert logged == {"robust/eps", *expected}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_metrics_of_the_user_are_counted_once_per_batch(launch, images, objective):
    (state,) = launch(
        Measuring(),
        loader(*images(32)),
        callbacks=[adversarial(objective)],
        collect=lambda trainer, module: module.state,
    )

    assert state["updates"] == [4] * 5
    assert state["steps"] == 4


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_every_precision_trains_all_weights(launch, images, objective, precision):
    x, y = images(16)
    net = seeded_net()
    start = snapshot(net)
    (trained,) = launch(
        Classifier(net),
        loader(x.double() if precision == "64-true" else x, y),
        precision=precision,
        callbacks=[adversarial(objective)],
        collect=lambda trainer, module: snapshot(module),
    )

    for name, value in start.items():
        assert not torch.equal(trained[f"net.{name}"], value.to(trained[f"net.{name}"].dtype)), name


# --- weights that are moved for a while


class OverflowingOnOne(Overflowing):
    """Has an infinite loss in its first two batches, in the last process only."""

    def training_step(self, batch, batch_idx):
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return super().training_step(batch, batch_idx if last else batch_idx + 2)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("objective", WITH_AWP, ids=repr)
def test_true_weights_survive_a_skipped_step(launch, images, objective, processes):
    net = seeded_net(batch_norm=True)
    start = {f"net.{name}": value.clone() for name, value in net.named_parameters()}
    weights = TrueWeights()
    after: list[bool] = []

    class After(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            after.append(identical(snapshot(pl_module), start))

    ranks = launch(
        OverflowingOnOne(net),
        loader(*images(32 * processes)),
        processes=processes,
        plugins=scaled(),
        callbacks=[weights, After(), adversarial(objective)],
        collect=lambda trainer, module: (module.state_dict(), weights.moved, weights.back, after),
    )

    for state, moved, back, unchanged in ranks:
        assert len(moved) == len(back) == 4
        # by an infinite gradient nothing is moved; in the other process the weights were, and are back as well
        assert moved[2:] == [objective.gamma > 0] * 2
        assert back == [True] * 4
        assert unchanged == [True, True, False, False]
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
    if processes == 2:
        assert ranks[0][1][:2] == [objective.gamma > 0] * 2
        parameters = start.keys()
        assert identical(*({name: state[name] for name in parameters} for state, *_ in ranks))


@pytest.mark.parametrize("place", ["step", "backward"])
def test_true_weights_survive_an_exception(launch, images, place):
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if place == "step" and len(self.seen) == 4:  # the second pass of the second batch
                raise ArithmeticError("on purpose")
            return loss

        def backward(self, loss, *args, **kwargs):
            if place == "backward" and len(self.seen) == 4:
                raise ArithmeticError("on purpose")
            super().backward(loss, *args, **kwargs)

    module, weights = Failing(), TrueWeights()
    with pytest.raises(ArithmeticError, match="on purpose"):
        launch(module, loader(*images(32)), callbacks=[weights, adversarial(AWP(gamma=0.1))])
    assert weights.moved == [True] * (1 if place == "step" else 2)
    assert identical(snapshot(module), weights.before)


# --- logits of the user's own step


class Counting(Classifier):
    """Counts the forwards of its net; ``variant`` says what its step does to the input."""

    def __init__(self, variant):
        super().__init__()
        self.variant = variant
        self.counts: list[int] = []
        self.num_forwards = 0
        self.net.register_forward_hook(self._count)

    def _count(self, *_):
        self.num_forwards += 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.variant == "augments":
            x = x.flip(-1)
        if self.variant == "watches":
            with torch.no_grad():
                self(x)
        return F.cross_entropy(self(x), y)

    def on_train_batch_start(self, batch, batch_idx):
        self.num_forwards = 0

    def on_train_batch_end(self, *_):
        self.counts.append(self.num_forwards)


@pytest.mark.parametrize(("variant", "extra"), [("plain", 0), ("augments", 1), ("watches", 1)])
def test_trades_uses_the_logits_of_the_step_where_it_can(launch, images, variant, extra):
    x, y = images(16)
    module = Counting(variant)
    launch(module, loader(x, y), callbacks=[adversarial(TRADES())])

    # a reference, the steps of the attack, the clean and the adversarial pass; the first batch is also checked
    assert module.counts[1] == 1 + STEPS + 2 + extra
    assert len(module.counts) == 2


@pytest.mark.parametrize("variant", ["plain", "augments", "watches"])
def test_trades_trains_on_its_formula(launch, images, variant):
    x, y = images(8)
    module = Counting(variant)
    net = copy.deepcopy(module.net)
    callback = adversarial(TRADES(beta=2.0))
    gradients: dict[str, Tensor] = {}

    class Gradients(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            gradients.update({name: p.grad.clone() for name, p in pl_module.net.named_parameters()})

    launch(module, loader(x, y), callbacks=[callback, Gradients()])

    with torch.no_grad():
        reference = net(x)
    x_adv = callback.attack(net, x, reference, step=1)
    clean, robust = net(x).log_softmax(1), net(x_adv).log_softmax(1)
    ordinary = F.cross_entropy(net(x.flip(-1)) if variant == "augments" else clean, y)
    (ordinary + 2.0 * (clean.exp() * (clean - robust)).sum() / len(x)).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


# --- manual optimisation


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_manual_optimisation_takes_what_is_one_ordinary_loss(launch, images, objective):
    module = Manual()
    start = snapshot(module)
    fit = lambda: launch(module, loader(*images(16)), callbacks=[adversarial(objective)])  # noqa: E731
    if objective.needs_second_pass or objective.reads_backward:
        with pytest.raises(UsageError, match="automatic_optimization=True"):
            fit()
        assert module.seen == []
    else:
        fit()
        assert not identical(snapshot(module), start)


class Shifting(Classifier):
    """Its step shifts images and labels, in the batch that it was given or beside it."""

    def __init__(self, net, *, writes):
        super().__init__(net)
        self.writes = writes

    def training_step(self, batch, batch_idx):
        x, y = batch
        x, y = (x.sub_(0.25), y.add_(1)) if self.writes else (x - 0.25, y + 1)
        return F.cross_entropy(self(x), y % 3)


@pytest.mark.parametrize("objective", PASSES, ids=repr)
def test_a_step_may_write_into_its_batch(launch, images, objective):
    x, y = images(16)
    modules = []
    for writes in (True, False):
        modules.append(Shifting(seeded_net(), writes=writes))
        launch(modules[-1], loader(x, y), callbacks=[adversarial(objective)], limit_train_batches=2)
    assert identical(*map(snapshot, modules))


def test_divergences_of_what_is_no_class_are_refused(launch, images):
    x, _ = images(16)

    class Regression(Classifier):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch[0]), batch[1])

    for objective in (TRADES(), AWP(TRADES())):
        for target in (torch.rand(16, 4), torch.ones(16, 4, dtype=torch.bool)):
            with pytest.raises(UsageError, match="no classes: TRADES compares probabilities"):
                launch(
                    Regression(seeded_net()),
                    loader(x, target),
                    callbacks=[adversarial(objective, input_key=0, target_key=1)],
                )


@pytest.mark.parametrize("attack_loss", ["dlr", "training_step", F.mse_loss])
def test_an_attack_loss_beside_a_divergence_is_refused(attack_loss):
    with pytest.raises(UsageError, match="does not go with objective=TRADES"):
        AdversarialTraining(TRADES(), attack_loss=attack_loss)


class Faint(Classifier):
    """Its loss is so small that its gradients vanish in half precision. Notes the input and a weight at every pass."""

    def __init__(self, net):
        super().__init__(net, lr=0.0)
        self.passes = []

    def training_step(self, batch, batch_idx):
        self.passes.append((batch[0].detach().clone(), self.net.head.weight.detach().clone()))
        return 2.0**-24 * F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(("objective", "moved"), [(FreeLB(2), 0), (AWP(), 1)], ids=["FreeLB", "AWP"])
def test_gradients_of_an_ascent_are_scaled_through_half_precision(launch, images, objective, moved):
    x, y = images(32)
    moves = []
    for plugins in ([], scaled(2.0**16)):
        net = seeded_net()
        net.head.weight.data.mul_(3)
        module = Faint(net)
        launch(module, loader(x, y, batch_size=32), callbacks=[adversarial(objective)], plugins=plugins)
        first, second = (seen[moved] for seen in module.passes)
        moves.append((second - first).flatten())
    assert float(torch.cosine_similarity(*moves, dim=0)) > 0.95
