"""LearnerTuning in a Trainer: the formula over both phases, processes, checkpoints, averages, attacks, refusals."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.checkpoint import checkpoint

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, LearnerTuning
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.learners import Learners
from robustdist.learners.pair import paired_layers
from robustdist.strategies import CompressedDDPStrategy
from tests.unit.learners.test_learners import Net

from .support import Classifier, identical, largest_difference, make_trainer, shares
from .support import run as run_trainer

EPOCHS, PRIMING, BATCHES = 3, 1, 4


class Tuned(Classifier):
    """Adam, whose moments show whether a continuation is exact."""

    def __init__(self, seed: int = 0):
        super().__init__(Net(seed))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class Filtered(Tuned):
    """Hands over what requires a gradient when optimisers are made."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


@pytest.fixture
def launch(tmp_path):
    """As usual, with the loaders as they are."""
    return functools.partial(run_trainer, tmp_path, use_distributed_sampler=False)


def sentences(num_samples: int = 32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 6, generator=generator)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def batches(processes: int = 1):
    """Loaders whose batches are the same samples for any number of processes."""
    x, y = sentences()
    return shares(x, y, len(x) // BATCHES // processes)


class Resumable:
    """A loader that goes on with the batch after the last one it gave."""

    def __init__(self, loader):
        self.loader, self.given = loader, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.given %= len(self)  # the Trainer does not ask for a batch after the last
        for batch in list(self.loader)[self.given :]:
            self.given += 1
            yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def tuning(**options):
    return LearnerTuning(**{"rank": 2, "priming_epochs": PRIMING, **options})


class Watch(pl.Callback):
    """Keeps the unmerged parameters before the first step and after every epoch, and which of them have gradients."""

    def __init__(self):
        self.parameters: list[dict[str, torch.Tensor]] = []
        self.gradients: list[set[str]] = []

    def on_train_start(self, trainer, pl_module):
        self._keep(pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append({name for name, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_epoch_end(self, trainer, pl_module):
        self._keep(pl_module)

    def _keep(self, module):
        self.parameters.append({name: p.detach().clone() for name, p in module.named_parameters()})


def naive_training() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Priming and tuning in plain torch with an optimiser for each; the merged weights, and all by epoch."""
    net = Net()
    learners = Learners(rank=2)
    module = torch.nn.Module()
    module.net = net
    learners.attach(module)
    parameters = dict(module.named_parameters())
    always = [p for name, p in parameters.items() if "learner" in name or "classifier" in name]
    attention = [p for name, p in parameters.items() if "attention" in name and "learner" not in name]
    for parameter in attention:
        parameter.requires_grad_(True)
    main = torch.optim.AdamW(always, lr=0.02, weight_decay=0.1)
    extra = torch.optim.AdamW(attention, lr=0.02, weight_decay=0.1)
    x, y = sentences()
    size = len(x) // BATCHES
    kept = []
    for epoch in range(EPOCHS):
        for start in range(0, len(x), size):
            main.zero_grad()
            extra.zero_grad()
            F.cross_entropy(net(x[start : start + size]), y[start : start + size]).backward()
            main.step()
            if epoch < PRIMING:
                extra.step()
        kept.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return module.state_dict(), kept


@pytest.mark.parametrize("kind", [Tuned, Filtered])
def test_both_phases_are_those_of_the_formula(launch, kind):
    watch, module = Watch(), kind()
    start = copy.deepcopy(module.state_dict())
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    launch(module, batches(), callbacks=[tuning(), watch], max_epochs=EPOCHS)
    merged, by_epoch = naive_training()
    assert largest_difference(module.state_dict(), merged) < 1e-6
    for found, expected in zip(watch.parameters[1:], by_epoch, strict=True):
        assert largest_difference(found, expected) < 1e-6
    # frozen means to the bit: norms, FFN weights under their pairs, and attention after priming
    after_priming, end = watch.parameters[1], watch.parameters[-1]
    trained = {n for n in end if "learner" in n or "classifier" in n}
    primed = {n for n in end if "attention" in n} - trained
    assert {n for n in end if not torch.equal(end[n], after_priming[n])} == trained
    assert {n for n in start if not torch.equal(start[n], after_priming[n])} == (trained | primed) & set(start)
    assert watch.gradients == [trained | primed] * BATCHES + [trained] * (2 * BATCHES)
    # nothing is left behind
    assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
    assert list(module.state_dict()) == list(start)
    assert paired_layers(module) == {}


@pytest.mark.slow
def test_two_processes_are_one_with_all_the_data(launch):
    def collect(trainer, module):
        return module.state_dict(), watch.parameters[-1], watch.gradients[-1], type(trainer.strategy.model).__name__

    watch = Watch()
    (single,) = launch(Tuned(), batches(), callbacks=[tuning(), watch], max_epochs=EPOCHS, collect=collect)
    watch = Watch()
    module = Tuned()
    ranks = launch(module, batches(2), processes=2, callbacks=[tuning(), watch], max_epochs=EPOCHS, collect=collect)
    assert identical(ranks[0][0], ranks[1][0])
    assert identical(ranks[0][1], ranks[1][1])
    assert largest_difference(ranks[0][0], single[0]) < 1e-5
    assert ranks[0][2] == single[2]
    assert not any("attention" in name and "learner" not in name for name in single[2])
    # the process that started the others has the merged weights
    assert identical(module.state_dict(), ranks[0][0])


def save_all(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_continues_exactly_from_any_phase(launch, tmp_path, processes):
    """In the middle of priming, at its end, in the middle of an epoch after it, and at the last step."""

    def callbacks(folder):
        return [tuning(), EMAWeightAveraging(decay=0.5), save_all(folder)]

    def collect(trainer, module):
        return module.state_dict()

    options = {"processes": processes, "max_epochs": EPOCHS, "enable_checkpointing": True, "collect": collect}
    whole = launch(Filtered(), Resumable(batches(processes)), callbacks=callbacks(tmp_path / "whole"), **options)
    last = torch.load(tmp_path / "whole" / f"step={EPOCHS * BATCHES}.ckpt", weights_only=True)
    for step in (BATCHES // 2, BATCHES, BATCHES + 2, EPOCHS * BATCHES):
        path, folder = tmp_path / "whole" / f"step={step}.ckpt", tmp_path / f"from{step}"
        # other weights and other draws: all of it has to come from the file
        other = [tuning(seed=7), *callbacks(folder)[1:]]
        resumed = launch(Filtered(seed=5), Resumable(batches(processes)), callbacks=other, ckpt_path=path, **options)
        assert all(identical(a, b) for a, b in zip(resumed, whole, strict=True)), step
        if step < EPOCHS * BATCHES:
            again = torch.load(folder / f"step={EPOCHS * BATCHES}.ckpt", weights_only=True)
            for key in ("state_dict", "current_model_state"):
                assert identical(again[key], last[key])
            own, expected = (file["callbacks"]["LearnerTuning"] for file in (again, last))
            assert own.keys() == expected.keys() == {"rank", "scale", "layers", "averages"}
            for one, two in [(own, expected), (own["averages"][0], expected["averages"][0])]:
                assert all(identical(one["layers"][name], two["layers"][name]) for name in two["layers"])


def test_a_checkpoint_is_one_of_the_plain_module(launch, tmp_path):
    x, _ = sentences()
    module, seen = Tuned(), {}

    class Outputs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen[trainer.global_step] = pl_module(x).detach()

    launch(
        module,
        batches(),
        callbacks=[tuning(), Outputs(), save_all(tmp_path)],
        max_epochs=EPOCHS,
        enable_checkpointing=True,
    )
    for step in (2, EPOCHS * BATCHES):
        plain = Tuned(seed=9)
        file = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        plain.load_state_dict(file["state_dict"], strict=True)
        torch.testing.assert_close(plain(x), seen[step], rtol=0, atol=1e-5)
    torch.testing.assert_close(module(x), seen[EPOCHS * BATCHES], rtol=0, atol=1e-5)
    assert float((Tuned()(x) - module(x)).detach().abs().max()) > 0.1


def test_a_checkpoint_made_after_fit_continues_too(tmp_path):
    trainer = make_trainer(callbacks=[tuning()], max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(Tuned(), batches())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    results = []
    for path in (None, str(tmp_path / "end.ckpt")):
        module = Tuned()
        trainer = make_trainer(callbacks=[tuning()], max_epochs=EPOCHS, default_root_dir=tmp_path)
        trainer.fit(module, batches(), ckpt_path=path)
        results.append(module.state_dict())
    assert identical(*results)


@pytest.mark.slow
def test_it_combines_with_attacks_averages_accumulation_and_bfloat16(launch, tmp_path):
    module = Tuned()
    attack = AdversarialTraining(attack=PGD(eps=0.1, steps=2, bounds=None))
    watch = Watch()

    def collect(trainer, module):
        return module.state_dict(), watch.parameters, len(watch.gradients)

    ranks = launch(
        module,
        batches(2),
        batches(2),
        processes=2,
        callbacks=[tuning(), watch, attack, EMAWeightAveraging(decay=0.5)],
        collect=collect,
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        precision="bf16-mixed",
    )
    assert identical(ranks[0][0], ranks[1][0])
    assert ranks[0][2] == EPOCHS * BATCHES // 2
    start, primed, *_, end = ranks[0][1]
    frozen = [name for name in end if "norm" in name or ("ffn" in name and "learner" not in name)]
    attention = [name for name in end if "attention" in name and "learner" not in name]
    pairs = [name for name in end if "learner" in name]
    assert (len(frozen), len(attention), len(pairs)) == (6, 4, 8)
    assert all(torch.equal(end[name], start[name]) for name in frozen)
    assert all(torch.equal(end[name], primed[name]) for name in attention)
    assert not any(torch.equal(primed[name], start[name]) for name in attention)
    assert not any(torch.equal(end[name], primed[name]) for name in pairs)


@pytest.mark.slow
def test_compressed_gradients_without_priming(launch):
    strategy = CompressedDDPStrategy("int8", start_method="fork")
    ranks = launch(Tuned(), batches(2), processes=2, callbacks=[tuning(priming_epochs=0)], strategy=strategy)
    assert identical(*ranks)


def test_an_interrupted_fit_leaves_a_plain_module(launch):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 6:
                raise RuntimeError("power failure")

    module = Tuned()
    keys = list(module.state_dict())
    with pytest.raises(RuntimeError, match="power failure"):
        launch(module, batches(), callbacks=[tuning(), Stop()], max_epochs=EPOCHS)
    assert [name for name, _ in module.named_parameters()] == keys
    assert all(p.requires_grad for p in module.parameters())
    launch(module, batches(), callbacks=[tuning()], max_epochs=EPOCHS)  # and can be trained again


def test_an_end_within_priming_is_told(launch):
    with pytest.warns(RobustDistWarning, match="training ended within priming_epochs=2"):
        launch(Tuned(), batches(), callbacks=[tuning(priming_epochs=2)], max_epochs=3, max_steps=5)


class Bypassing(Tuned):
    """Uses the weight of a layer without calling it."""

    def forward(self, x):
        first = self.net.blocks[0]
        hidden = first.norm(F.linear(x, first.ffn.weight) + first.attention(x))
        return self.net.classifier(self.net.blocks[1](hidden))


class Recomputing(Tuned):
    """Keeps no activations; below the first checkpoint nothing requires a gradient once embeddings are frozen."""

    reentrant = True

    def forward(self, x):
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.net.classifier(x)


class RecomputingWell(Recomputing):
    reentrant = False


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Bypassing, r"beside net.blocks.0.ffn \(1 in all\) got no gradient"),
        (Recomputing, r"beside net.blocks.0.attention \(4 in all\) got no gradient .* use_reentrant=False"),
        (RecomputingWell, None),
    ],
)
def test_pairs_that_take_no_part_are_told(launch, make, words):
    if words is None:
        launch(make(), batches(), callbacks=[tuning()], max_epochs=2)  # a warning of ours would be an error
        return
    with pytest.warns(RobustDistWarning, match=words):
        launch(make(), batches(), callbacks=[tuning(priming_epochs=0)], max_epochs=2)


class HeadOnly(Tuned):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.classifier.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "callbacks", "options", "words"),
    [
        (Tuned, lambda: [tuning(priming_epochs=3)], {}, "priming_epochs=3 leaves none of max_epochs=3"),
        (Tuned, lambda: [tuning(targets="lstm")], {}, "targets='lstm' matches no linear layer"),
        (HeadOnly, lambda: [tuning()], {}, "no optimizer holds net.blocks.0.attention.weight (12 of 14 trained"),
        (Tuned, lambda: [EMAWeightAveraging(), tuning()], {}, "list LearnerTuning first"),
        (Tuned, lambda: [tuning()], {"strategy": FSDPStrategy()}, "FSDPStrategy shards them: use strategy='ddp'"),
        (Tuned, lambda: [tuning()], {"strategy": CompressedDDPStrategy()}, "set priming_epochs=0, or use strategy='dd"),
    ],
)
def test_what_cannot_work_is_refused(launch, monkeypatch, make, callbacks, options, words):
    if "strategy" in options:
        # the strategy itself would ask for a GPU or for processes: only what setup sees of it matters
        trainer, module = make_trainer(max_epochs=3, callbacks=callbacks()), make()
        monkeypatch.setattr(trainer._accelerator_connector, "strategy", options["strategy"])
        call = lambda: trainer.callbacks[0].setup(trainer, module, "fit")  # noqa: E731
    else:
        module = make()
        call = lambda: launch(module, batches(), callbacks=callbacks(), max_epochs=3)  # noqa: E731
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert paired_layers(module) == {}


@pytest.mark.parametrize("epochs", [-1, 1.5, True])
def test_priming_is_counted_in_whole_epochs(epochs):
    with pytest.raises(UsageError, match="priming_epochs"):
        LearnerTuning(priming_epochs=epochs)


def test_a_checkpoint_with_other_pairs_is_refused(launch, tmp_path):
    launch(Tuned(), batches(), callbacks=[tuning(), save_all(tmp_path)], max_epochs=2, enable_checkpointing=True)
    with pytest.raises(UsageError, match="rank=3, scale 1 and 4 layers do not fit the checkpoint, which has rank 2"):
        launch(Tuned(), batches(), callbacks=[tuning(rank=3)], ckpt_path=tmp_path / "step=2.ckpt", max_epochs=2)
