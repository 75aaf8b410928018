"""Samples without label under a Trainer: the user's step sees labelled samples and guesses, nothing else."""

from __future__ import annotations

import time

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.core.redirect import StepInterceptor
from robustdist.data import UnlabeledMix
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT

from .support import EPS, STEP_SIZE, Classifier, Memory, Shares, identical, loader, naive_pgd, seeded_net, shares


class Counting(Classifier):
    """Counts labelled samples, as an accuracy would."""

    def __init__(self, net=None):
        super().__init__(net)
        self.count = SumMetric()
        self.given: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.given.append(y.clone())
        self.count.update(float(len(y)))
        loss = F.cross_entropy(self(x), y)
        self.log("rows", float(len(y)), on_step=True, batch_size=len(y))
        return {"loss": loss, "rows": len(y)}


def training(mode="pseudo", clean_weight=0.5, weight=2.0, **options):
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)
    return AdversarialTraining(DAT(clean_weight, weight, mode), attack, **options)


def with_gaps(y, every=2):
    """Take the label of every second sample away."""
    y = y.clone()
    y[1::every] = -1
    return y


def naive_loss(net, x, y):
    """Return the loss with pseudo-labels, weights 0.5 and 2."""
    known = y >= 0
    total = x.new_zeros(())
    if known.any():
        x_adv = naive_pgd(net, x[known], y[known], EPS, STEP_SIZE, 3).detach()
        total = total + F.cross_entropy(net(x_adv), y[known]) + 0.5 * F.cross_entropy(net(x[known]), y[known])
    if not known.all():
        guesses = net(x[~known]).argmax(1)
        x_adv = naive_pgd(net, x[~known], guesses, EPS, STEP_SIZE, 3).detach()
        total = total + 2.0 * F.cross_entropy(net(x_adv), guesses)
    return total


def naive_training(net, steps):
    """Train on the mean loss over the processes of each step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    for batches in steps:
        optimizer.zero_grad()
        for x, y in batches:
            (naive_loss(net, x, y) / len(batches)).backward()
        optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_training_equals_the_formula(launch, images):
    x, y = images(32)
    data = loader(x, with_gaps(y))
    (state,) = launch(Classifier(), data, callbacks=[training()])
    assert_same(state, naive_training(seeded_net(), [[batch] for batch in data]))


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_logs_and_metrics_are_those_of_the_labelled_samples(launch, images, mode):
    x, y = images(32)
    y = with_gaps(y, every=4)  # six of eight have a label
    module, memory = Counting(), Memory()
    launch(module, loader(x, y), callbacks=[training(mode)], logger=memory, log_every_n_steps=1)

    assert float(module.count.compute()) == 24.0
    assert memory.values("rows") == [6.0] * 4
    assert all(bool((given >= 0).all()) for given in module.given)
    passes = 3 if mode == "pseudo" else 2
    assert [len(given) for given in module.given] == ([6, 6, 2][:passes]) * 4
    for key in ("robust/adv_loss", "robust/clean_loss", "robust/unlabeled_loss"):
        assert len(memory.values(key)) == 4


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_guesses_are_never_logged_nor_counted(launch, images, mode):
    x, y = images(16)
    module, memory = Counting(), Memory()
    start = module.net.head.weight.detach().clone()
    launch(module, loader(x, torch.full_like(y, -1)), callbacks=[training(mode)], logger=memory, log_every_n_steps=1)
    assert memory.values("rows") == []
    assert module.count.update_count == 0
    assert len(memory.values("robust/unlabeled_loss")) == 2
    assert not torch.equal(module.net.head.weight, start)


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_processes_may_hold_only_one_kind(launch, images, mode):
    # the first process has no label at all in the first step, the second all of them
    x, y = images(16)
    y[:4] = -1
    y[13] = -1
    common = {"processes": 2, "use_distributed_sampler": False, "callbacks": [training(mode)]}
    ranks = launch(Classifier(seeded_net(batch_norm=False)), shares(x, y, 4), **common)
    assert identical(ranks[0], ranks[1])
    if mode == "pseudo":
        steps = [[(x[first : first + 4], y[first : first + 4]) for first in (start, start + 4)] for start in (0, 8)]
        assert_same(ranks[0], naive_training(seeded_net(), steps))


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_a_mix_trains_on_two_processes(launch, images, mode):
    x, y = images(24)
    mix = UnlabeledMix(TensorDataset(x[:8], y[:8]), TensorDataset(x[8:]), share=0.5)
    torch.manual_seed(0)
    ranks = launch(
        Counting(), DataLoader(mix, batch_size=4, shuffle=True), processes=2, callbacks=[training(mode)], max_epochs=2
    )
    assert identical(ranks[0], ranks[1])
    assert all(bool(torch.isfinite(value).all()) for value in ranks[0].values())


def test_other_entries_are_cut_with_the_samples(launch, images):
    x, y = images(16)
    seen = []

    class Named(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append((batch["index"].tolist(), batch["name"], len(batch["image"]), batch["kind"]))
            return F.cross_entropy(self(batch["image"]), batch["label"])

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, row):
            return {"image": x[row], "label": with_gaps(y)[row], "index": row, "name": f"n{row}"}

    def collate(rows):
        return {**torch.utils.data.default_collate(rows), "kind": "train"}

    launch(Named(), DataLoader(Rows(), batch_size=4, collate_fn=collate), callbacks=[training(clean_weight=0.0)])
    assert seen[:2] == [([0, 2], ["n0", "n2"], 2, "train"), ([1, 3], ["n1", "n3"], 2, "train")]
    assert len(seen) == 8


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"max_epochs": 2}])
@pytest.mark.parametrize("mode", ["pseudo", "kl"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_it_combines(launch, images, options, mode, wrapped):
    x, y = images(32)
    module = Classifier(seeded_net(batch_norm=True))
    start = module.net.head.weight.detach().clone()
    objective = AWP(DAT(1.0, 1.0, mode)) if wrapped else DAT(1.0, 1.0, mode)
    callback = AdversarialTraining(objective, PGD(eps=EPS, steps=2))
    launch(module, loader(x, with_gaps(y)), callbacks=[callback], gradient_clip_val=0.5, **options)
    assert not torch.equal(module.net.head.weight, start)
    assert all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())


def test_manual_optimisation_and_batches_that_cannot_be_cut_are_refused(launch, images):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    x, y = images(8)
    module = Manual()
    with pytest.raises(UsageError, match="unlabelled samples are trained on apart from the others"):
        launch(module, loader(x, with_gaps(y)), callbacks=[training(clean_weight=0.0)])
    assert module.seen == []

    def collate(rows):
        return [*torch.utils.data.default_collate(rows), torch.zeros(3)]

    data = DataLoader(TensorDataset(x, with_gaps(y)), batch_size=8, collate_fn=collate)
    with pytest.raises(UsageError, match=r"cannot be cut to some of its 8 samples: its entry '2' has shape \(3,\)"):
        launch(Classifier(), data, callbacks=[training(input_key=0, target_key=1)])


class Told(pl.Callback):
    """Writes down with what each process ended."""

    def __init__(self, folder):
        self.folder = folder

    def setup(self, trainer, pl_module, stage):
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        StepInterceptor.of(trainer.strategy).add(self.step, order=-1)

    def step(self, next_step, batch, /, *args):
        try:
            return next_step(batch, *args)
        except UsageError as error:
            (self.folder / f"told{self.rank}").write_text(str(error))
            # the launcher ends the others as soon as one has failed
            end = time.monotonic() + 10
            while len(list(self.folder.glob("told*"))) < self.world_size and time.monotonic() < end:
                time.sleep(0.01)
            raise


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("reason", ["one row", "cannot be cut"])
def test_what_one_process_refuses_ends_all_with_its_sentence(launch, images, tmp_path, reason, wrapped):
    x, y = images(16)
    y[13] = -1  # the first label that is missing, alone, in the second step of the second process
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    def collate(rows):
        batch = torch.utils.data.default_collate(rows)
        return batch if reason == "one row" else [*batch, torch.zeros(3)]

    data = DataLoader(TensorDataset(x, y), batch_size=4, sampler=Shares(16, 4), collate_fn=collate)
    objective = DAT(0.5, 2.0)
    callback = AdversarialTraining(AWP(objective) if wrapped else objective, PGD(eps=EPS, steps=1), 0, 1)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException):
        launch(
            Classifier(net),
            data,
            processes=2,
            use_distributed_sampler=False,
            callbacks=[callback, Told(tmp_path)],
        )
    words = "batch norm cannot train on the only" if reason == "one row" else "the batch cannot be cut"
    told = [(tmp_path / f"told{rank}").read_text() for rank in (0, 1)]
    assert all(text.startswith(words) and text.endswith("(process 1)") for text in told), told
