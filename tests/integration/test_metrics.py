"""Logs and metrics of the user: once per batch, from the adversarial pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.errors import UsageError
from robustdist.objectives import DAT, PGDAT

from .support import Classifier, Memory, loader, make_trainer, naive_training, seeded_net


class Measuring(Classifier):
    """Logs and counts in the ways that people do."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.collection = MetricCollection({"top1": MulticlassAccuracy(4, average="micro"), "sum": SumMetric()})
        self.nested = nn.ModuleDict({"fit": nn.ModuleList([MeanMetric()])})
        self.first = self.second = SumMetric()  # one metric under two names
        self.losses: list[float] = []
        self.right: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(float(loss))
        self.right.append(int((logits.argmax(1) == y).sum()))
        self.accuracy(logits, y)
        self.collection["top1"].update(logits, y)
        self.collection["sum"].update(loss.detach())
        self.nested["fit"][0].update(loss.detach())
        self.second.update(1.0)
        self.log("train/loss", loss, on_step=True, on_epoch=False)
        self.log_dict({"train/twice": 2 * loss}, on_step=True, on_epoch=False)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "count": len(x)}

    def on_train_epoch_end(self):
        self.state = {
            "updates": [
                metric.update_count
                for metric in (self.accuracy, *self.collection.values(), self.nested["fit"][0], self.second)
            ],
            "sum": float(self.collection["sum"].compute()),
            "mean": float(self.nested["fit"][0].compute()),
            "top1": float(self.collection["top1"].compute()),
            "steps": float(self.first.compute()),
        }


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("objective", "passes"), [(PGDAT(), 1), (DAT(1.0), 2)])
def test_everything_is_counted_once_and_from_the_adversarial_pass(launch, images, processes, objective, passes):
    x, y = images(64)
    logger = Memory()

    def collect(trainer, module):
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return module.state, module.losses, module.right, logger.entries, metrics

    results = launch(
        Measuring(),
        loader(x, y, batch_size=8 // processes),
        processes=processes,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[AdversarialTraining(objective, PGD(eps=0.25, steps=2))],
        collect=collect,
    )

    for state, losses, *_ in results:
        assert len(losses) == 8 * passes
        assert state["updates"] == [8] * 5
        assert state["steps"] == 8 * processes  # compute() sums over processes
    adversarial = [value for _, losses, *_ in results for value in losses[::passes]]
    assert state["sum"] == pytest.approx(sum(adversarial), rel=1e-5)
    assert state["mean"] == pytest.approx(sum(adversarial) / len(adversarial), rel=1e-5)
    right = sum(sum(counts[::passes]) for _, _, counts, *_ in results)
    assert state["top1"] == pytest.approx(right / 64)
    assert results[0][4]["train/acc"] == pytest.approx(right / 64)

    _, losses, _, entries, _ = results[0]

    def logged(key):
        return [entry[key] for entry in entries if key in entry]

    assert logged("train/loss") == pytest.approx(losses[::passes])
    assert logged("train/twice") == pytest.approx([2 * loss for loss in losses[::passes]])
    assert logged("robust/eps") == pytest.approx([0.25] * 8)
    if passes == 2:
        assert logged("robust/adv_loss") == pytest.approx(losses[::2])
        assert logged("robust/clean_loss") == pytest.approx(losses[1::2])
        # the two passes differ, so that the lists above could not be mistaken
        assert all(abs(one - other) > 1e-4 for one, other in zip(losses[::2], losses[1::2], strict=True))
    else:
        assert logged("robust/clean_loss") == []


def test_metrics_of_two_trainings_do_not_mix(tmp_path, images):
    x, y = images(64)
    callback = AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=1))
    for _ in range(2):
        module = Measuring()
        make_trainer(callbacks=[callback], default_root_dir=tmp_path).fit(module, loader(x, y))
        assert module.state["updates"] == [8] * 5
        assert module.state["steps"] == 8
        # the module has its own metrics back
        assert module.first is module.second is module._modules["second"]


class Manual(Classifier):
    def __init__(self, net=None):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].detach().clone())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("objective", [PGDAT(), DAT(0.0)])
def test_manual_optimisation_trains_on_adversarial_images(launch, images, processes, objective):
    from .support import EPS, STEP_SIZE, largest_difference, shares

    x, y = images(64)
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)
    callback = AdversarialTraining(objective, attack)
    results = launch(
        Manual(seeded_net()),
        shares(x, y, 8 // processes),
        processes=processes,
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=[callback],
        collect=lambda trainer, module: (module.state_dict(), callback.state_dict()),
    )
    net = seeded_net().double()
    naive_training(net, [(a.double(), b) for a, b in zip(x.split(8), y.split(8), strict=True)], clean_weight=0.0)
    for weights, counters in results:
        assert largest_difference(weights, {f"net.{k}": v for k, v in net.state_dict().items()}) < 1e-10
        assert counters == {"num_attacks": 8, "num_steps": 8, "started_at": 0, "step_factor": 1.0}


def test_manual_optimisation_refuses_a_second_pass_before_the_first_batch(tmp_path, images):
    module = Manual()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(callbacks=[AdversarialTraining(DAT(1.0))], default_root_dir=tmp_path)
    with pytest.raises(UsageError, match=r"manual optimisation.*PGDAT"):
        trainer.fit(module, loader(*images(16)))
    assert module.seen == []
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert "training_step" not in vars(trainer.strategy)


class TwoPlayers(Classifier):
    """Two optimisers that are switched on and off in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = seeded_net(1)
        self.trained: list[bool] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].detach().clone())
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            before = net.head.weight.detach().clone()
            self.manual_backward(F.cross_entropy(net(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.trained.append(not torch.equal(before, net.head.weight))

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


def test_two_optimisers_in_turn(launch, images):
    x, y = images(32)
    callback = AdversarialTraining(PGDAT(), PGD(eps=0.1, steps=2))
    module = TwoPlayers()
    launch(module, loader(x, y), callbacks=[callback])
    assert module.trained == [True] * 8
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert float((torch.cat(module.seen) - x).abs().max()) > 0.05
    assert callback.state_dict() == {"num_attacks": 4, "num_steps": 4, "started_at": 0, "step_factor": 1.0}


class Skipping(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.parametrize("objective", [PGDAT(), DAT(1.0)])
def test_a_step_may_skip_its_batch(launch, images, objective):
    x, y = images(32)
    net = seeded_net()
    module = Skipping(net, momentum=0.0)
    before = net.head.weight.detach().clone()
    launch(module, loader(x, y), callbacks=[AdversarialTraining(objective, PGD(eps=0.1, steps=1))])
    assert not torch.equal(before, net.head.weight)
    # the second pass of a skipped batch is not made
    assert len(module.seen) == (6 if objective.needs_second_pass else 4)
