"""Processes that exchange samples train as one process on all of them, and stay equal."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from robustdist import UsageError
from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.comm.cost import dense_bytes
from robustdist.comm.sample_exchange import HEADER_BYTES
from robustdist.core.testing import toy_images
from robustdist.objectives import DAT
from robustdist.strategies import QuantizedDataStrategy

from .support import Classifier, identical, largest_difference, seeded_net, shares

pytestmark = pytest.mark.slow


def quantized(**options):
    return QuantizedDataStrategy(start_method="fork", check_every=1, **options)


def pixels(num_samples: int, **options: int):
    x, y = toy_images(num_samples, **options)
    return (x * 255).round() / 255, y


class OfBytes(Classifier):
    """Scales its images itself, as many data pipelines leave it to the GPU."""

    def training_step(self, batch, batch_idx):
        x, y, *weight = batch
        x = x.float() / 255
        self.log("train_loss", loss := (F.cross_entropy(self(x), y, reduction="none") * weight[0]).mean())
        return {"loss": loss}


class Manual(Classifier):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss := F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()
        return loss


def figures(trainer, module):
    stats = trainer.strategy.comm_stats() if hasattr(trainer.strategy, "comm_stats") else {}
    return {"weights": module.state_dict(), "stats": stats, "seen": getattr(module, "seen", [])}


FIT = {"use_distributed_sampler": False, "max_epochs": 2, "collect": figures}


@pytest.mark.parametrize(
    ("processes", "kind", "options"),
    [
        (2, Classifier, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (3, Classifier, {}),
        (2, OfBytes, {}),
        (2, Manual, {}),
    ],
)
def test_eight_bits_are_training_on_the_union(launch, processes, kind, options):
    x, y = pixels(12 * processes)
    data = [x, y]
    if kind is OfBytes:
        data = [(x * 255).round().to(torch.uint8), y, torch.linspace(0.5, 1.5, len(x))]
    union = launch(
        kind(seeded_net(batch_norm=True)),
        DataLoader(TensorDataset(*data), batch_size=4 * processes),
        **FIT,
        **options,
    )[0]
    ranks = launch(
        kind(seeded_net(batch_norm=True)),
        DataLoader(TensorDataset(*data), batch_size=4, sampler=shares(x, y, 4).sampler),
        processes=processes,
        strategy=quantized(num_classes=4, **({"input_key": 0, "target_key": 1} if kind is OfBytes else {})),
        **FIT,
        **options,
    )
    assert all(identical(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    assert largest_difference(ranks[0]["weights"], union["weights"]) < 1e-7
    steps = 4 if options else 6  # the last batch of an epoch of three is a step of its own
    for rank in ranks:
        stats = rank["stats"]
        batch = 4 * 36 + math.ceil(4 * 2 / 8) + (4 * 4 if kind is OfBytes else 0)
        assert stats["bytes_sent"] == 6 * (processes - 1) * (batch + HEADER_BYTES)
        assert (stats["calls"], stats["steps"]) == (6, steps)
        trained = sum(p.numel() for p in seeded_net(batch_norm=True).parameters())
        assert stats["bytes_dense"] == dense_bytes(steps * trained, processes)
        assert stats["ratio"] == stats["bytes_dense"] / stats["bytes_sent"]


def test_replicas_stay_equal_with_few_bits_dropout_and_other_seeds(launch):
    class Unseeded(Classifier):
        def setup(self, stage):
            torch.manual_seed(self.global_rank)  # as processes that were started without seed_everything
            self.net.head.reset_parameters()
            self.net.norm.running_mean.fill_(self.global_rank)

        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]), batch_idx)

    ranks = launch(
        Unseeded(seeded_net(batch_norm=True, dropout=0.5)),
        shares(*pixels(36), 4),
        processes=3,
        strategy="ddp_quantized_data_fork",
        **FIT,
    )
    assert all(identical(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    assert all(torch.equal(one, other) for one, other in zip(ranks[0]["seen"], ranks[2]["seen"], strict=True))
    assert largest_difference(ranks[0]["weights"], seeded_net_state()) > 0.01


def seeded_net_state():
    return {f"net.{name}": value for name, value in seeded_net(batch_norm=True, dropout=0.5).state_dict().items()}


@pytest.mark.parametrize("place", ["step", "end"])
def test_a_module_that_draws_by_rank_is_caught(launch, place):
    class ByRank(Classifier):
        def training_step(self, batch, batch_idx):
            noise = self.global_rank * 1e-4 if place == "step" and batch_idx == 1 else 0.0
            return super().training_step((batch[0] + noise, batch[1]), batch_idx)

        def on_train_epoch_end(self):
            if place == "end":
                with torch.no_grad():
                    self.net.head.bias[0] += self.global_rank * 1e-7

    before = "batch 2" if place == "step" else "batch 3"
    with pytest.raises(
        Exception, match=f"the weights or buffers of process 1 differ from those of process 0 before {before},"
    ):
        launch(ByRank(), shares(*pixels(24), 4), processes=2, strategy=quantized(bits=4), **{**FIT, "max_epochs": 1})


def test_a_resumed_run_goes_on_bit_for_bit_also_in_mid_epoch(launch, tmp_path):
    x, y = (one.repeat(6, *[1] * (one.dim() - 1)) for one in pixels(8))  # every batch the same images

    def fit(seed, name, **options):
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", save_top_k=-1, every_n_train_steps=4)
        return launch(
            Classifier(seeded_net(seed, batch_norm=True, dropout=0.5)),
            shares(x, y, 4),
            processes=2,
            strategy=quantized(bits=2),
            callbacks=[saver],
            enable_checkpointing=True,
            **{**FIT, **options},
        )

    whole = fit(0, "whole")
    for step in (4, 8):  # in the middle of the first and of the second epoch of six steps
        resumed = fit(5, "resumed", ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert all(identical(one["weights"], other["weights"]) for one, other in zip(whole, resumed, strict=True))
    saved = torch.load(tmp_path / "whole" / "step=8.ckpt", weights_only=True)
    assert saved["robustdist.quantized_data"] == {"batches": 8}


class Gradients(pl.Callback):
    """Keeps the gradients of all steps."""

    def __init__(self):
        self.seen: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(gradient_of(pl_module))


def gradient_of(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()]).double()


def gradients(trainer, module):
    return next(callback for callback in trainer.callbacks if isinstance(callback, Gradients)).seen, module.seen


@pytest.mark.parametrize("refine", [True, False])
def test_the_refined_gradient_is_unbiased_for_one_bit(launch, refine):
    class Steep(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(4 * self(batch[0]), batch[1])

    x, y = pixels(16, size=12)  # so that the head has more elements than travel uncompressed
    module = Steep(seeded_net(size=12), lr=0.0)
    seen, _ = launch(
        module,
        shares(x.repeat(120, 1, 1, 1), y.repeat(120), 8),
        processes=2,
        strategy=QuantizedDataStrategy(bits=1, refine=refine, start_method="fork"),
        callbacks=[Gradients()],
        collect=gradients,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )[0]
    F.cross_entropy(4 * module(x), y).backward()
    drawn = torch.stack(seen)
    error = drawn.var(0).sum() / len(drawn)
    # about one where nothing but chance parts the mean from the gradient
    ratio = float((drawn.mean(0) - gradient_of(module)).square().sum() / error)
    assert ratio < 1.5 if refine else ratio > 5


@pytest.mark.parametrize("select", ["top", "importance"])
def test_selected_samples_alone_are_sent(launch, select):
    x, y = pixels(96)
    module = Classifier(seeded_net(), lr=0.0)
    ranks = launch(
        module,
        shares(x, y, 8),
        processes=2,
        strategy=quantized(select=select, ratio="1/4", score="loss", num_classes=4, forward="net"),
        callbacks=[Gradients()],
        collect=lambda trainer, module: (*gradients(trainer, module), trainer.strategy.comm_stats()["bytes_sent"]),
        use_distributed_sampler=False,
    )
    assert all(torch.equal(one, other) for one, other in zip(ranks[0][1], ranks[1][1], strict=True))
    found, batches, sent = ranks[0]
    assert sent == 6 * (2 * 36 + 1 + HEADER_BYTES + (2 * 4 if select == "importance" else 0))
    difficulty = F.cross_entropy(module(x), y, reduction="none")
    for step, (gradient, batch) in enumerate(zip(found, batches, strict=True)):
        rows = [(x == image).flatten(1).all(1).nonzero().item() for image in batch]
        assert set(rows) <= set(range(16 * step, 16 * step + 16))
        assert len(set(rows)) == 4
        if select == "top":
            parts = [difficulty[first : first + 8] for first in (16 * step, 16 * step + 8)]
            hardest = [sorted(part.argsort()[-2:].tolist()) for part in parts]
            assert rows == [16 * step + 8 * rank + row for rank in range(2) for row in hardest[rank]]
        # the repeated samples add up, over the number of all samples
        scale = 1 / 16 if select == "importance" else 1 / 4
        module.zero_grad()
        (scale * F.cross_entropy(module(x[rows]), y[rows], reduction="sum")).backward()
        torch.testing.assert_close(gradient, gradient_of(module), atol=1e-6, rtol=1e-5)
    assert select == "top" or sum(map(len, batches)) == pytest.approx(96, rel=0.3)


@pytest.mark.parametrize("bits", [8, 3])
def test_adversarial_training_on_the_union_is_that_of_one_process(launch, bits):
    x, y = pixels(16)

    def fit(processes, batch_size, **options):
        attack = AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=2, random_start=True))
        module = Classifier(seeded_net(batch_norm=True))
        return launch(module, shares(x, y, batch_size), processes=processes, callbacks=[attack], **FIT, **options)

    ranks = fit(2, 4, strategy=quantized(bits=bits))
    assert identical(ranks[0]["weights"], ranks[1]["weights"])
    one = fit(1, 8)[0]
    assert (largest_difference(ranks[0]["weights"], one["weights"]) < 1e-7) == (bits == 8)


class NoLabels(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1, 6, 6)


class Named(NoLabels):
    def __getitem__(self, index):
        return torch.rand(1, 6, 6), index % 4, f"{index}.png"


class Uneven(torch.utils.data.Sampler):
    def __iter__(self):
        yield from ([0, 1, 2, 3], [4, 5, 6, 7]) if dist.get_rank() == 0 else ([0, 1, 2, 3], [4, 5, 6])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(NoLabels(), 4), "the batch is a bare tensor without targets"),
        (lambda: DataLoader(Named(), 4), "the entry '2.0' of the batch is of type str"),
        (lambda: DataLoader(TensorDataset(*pixels(8)), batch_sampler=Uneven()),
         r"unlike batches or settings.*process 1: float32\[3, 1, 6, 6\], int64\[3\]"),
        (lambda: shares(2 * pixels(8)[0], pixels(8)[1], 4), r"bounds=\(0.0, 1.0\) do not hold for this batch"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_ends_all_processes_with_a_sentence(launch, loader, message):
    with pytest.raises(Exception, match=message):
        launch(Classifier(), loader(), processes=2, strategy=quantized(), **FIT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits=0 must be"),
        ({"ratio": 0.5}, "ratio=0.5 leaves open what to send: set select='top'"),
        ({"select": "top", "ratio": 0}, "ratio=0 must be above 0"),
        ({"select": "best"}, "select='best' must be"),
        ({"select": "top", "score": "norm"}, "score='norm' must be"),
        ({"select": "top", "refine": True}, "refine=True is about whole batches, and select='top'"),
        ({"check_every": 0}, "check_every=0 must be"),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        QuantizedDataStrategy(**options)


@pytest.mark.parametrize(
    ("module", "options", "trainer", "message"),
    [
        (Manual, {"refine": True}, {}, "refine=True changes the gradient .* manual optimisation"),
        (Manual, {"select": "importance"}, {}, "select='importance' changes the gradient"),
        (Classifier, {"refine": True}, {"callbacks": [AdversarialTraining()]}, "does not go with AdversarialTraining"),
        (Classifier, {}, {"sync_batchnorm": True}, "sync_batchnorm=True has nothing to do"),
    ],
)
def test_modules_and_trainers_that_do_not_fit_are_refused_in_fit(launch, module, options, trainer, message):
    strategy = QuantizedDataStrategy(start_method="fork", **options)
    with pytest.raises(Exception, match=message):
        launch(module(seeded_net(batch_norm=True)), shares(*pixels(8), 4), processes=2, strategy=strategy, **trainer)
