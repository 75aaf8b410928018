"""Ratios of domains in a real training: unmodified data, workers, several processes, a break in the middle."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset

from examples import domain_reweighting
from robustdist.attacks import FGSM
from robustdist.callbacks import DomainReweighting, RobustEvaluation
from robustdist.domains import DomainSampler
from robustdist.errors import RobustDistWarning, UsageError
from tests.bert import tiny_bert
from tests.vader import write_source, write_tokenizer

from .support import Memory, make_trainer, run

SIZES = (1000, 50, 3)
ROOT = Path(__file__).parents[2]


class Net(pl.LightningModule):
    """Knows nothing of domains. Keeps the numbers of the samples that its step saw."""

    def __init__(self, spoiled=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 2)
        self.seen: list[int] = []
        self.spoiled = spoiled
        self.validations = -1

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen += batch[2].tolist()
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_validation_start(self):
        self.validations += 1

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        spoiled = self.validations in self.spoiled and dataloader_idx == 1
        self.log("val_loss", loss * float("nan") if spoiled else loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def part(domain: int, size: int, seed: int) -> TensorDataset:
    """Each domain asks for something else, so that what helps one harms another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    y = (x[:, domain] > 0).long() if domain < 2 else (x[:, 0] < 0).long()
    return TensorDataset(x, y, torch.arange(size) + 10_000 * domain)


class Data(pl.LightningDataModule):
    def __init__(self, num_workers=0, num_val=3, batch_size=4):
        super().__init__()
        self.num_workers, self.num_val, self.batch_size = num_workers, num_val, batch_size

    def train_dataloader(self):
        whole = ConcatDataset([part(domain, size, domain) for domain, size in enumerate(SIZES)])
        return DataLoader(whole, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return [DataLoader(part(domain, 20, 7 + domain), batch_size=10) for domain in range(self.num_val)]


def fit(folder, callback, module=None, data=None, **options):
    module = module or Net()
    options = {"default_root_dir": folder, "max_steps": 40, "max_epochs": -1, "val_check_interval": 10, **options}
    options["callbacks"] = [callback, *options.pop("callbacks", [])]
    trainer = make_trainer(**{"check_val_every_n_epoch": None, **options})
    trainer.fit(module, datamodule=data or Data())
    return module, trainer


def shares(seen: list[int]) -> list[float]:
    return [sum(place // 10_000 == domain for place in seen) / len(seen) for domain in range(3)]


def test_the_domain_that_lags_is_sampled_more(tmp_path):
    logger = Memory()
    callback = DomainReweighting("static_dro", domain_names=["large", "middle", "small"], ratios=[1, 1, 1])
    module, trainer = fit(tmp_path, callback, logger=logger, max_steps=200)
    assert sum(callback.ratios.values()) == pytest.approx(1)
    assert callback.ratios["small"] > 0.4, "it contradicts the first domain"
    assert shares(module.seen[:40]) == pytest.approx([1 / 3] * 3, abs=0.2)
    drawn_by = [sum(logger.values(f"domains/ratio/{name}")[-11:-1]) / 10 for name in callback.names]
    assert shares(module.seen[-400:]) == pytest.approx(drawn_by, abs=0.07)
    for name, ratio in callback.ratios.items():
        assert logger.values(f"domains/ratio/{name}")[-1] == ratio
        assert len(logger.values(f"domains/ratio/{name}")) == 20
        assert logger.values(f"domains/reference/{name}") == [0.0] * 20
        assert float(trainer.callback_metrics[f"domains/ratio/{name}"]) == pytest.approx(ratio)
    losses = [logger.values(f"val_loss/dataloader_idx_{domain}")[-1] for domain in range(3)]
    assert [logger.values(f"domains/loss/{name}")[-1] for name in callback.names] == pytest.approx(losses)
    assert "process_dataloader" not in vars(trainer.strategy)
    assert callback.sampler.counts == [round(share * len(module.seen)) for share in shares(module.seen)]


def test_the_constant_mix_is_that_of_the_data_and_needs_no_validation(tmp_path):
    callback = DomainReweighting("constant")
    module, _ = fit(tmp_path, callback, limit_val_batches=0, max_steps=250)
    assert shares(module.seen) == pytest.approx([size / sum(SIZES) for size in SIZES], abs=0.03)
    assert list(callback.ratios.values()) == [size / sum(SIZES) for size in SIZES]
    assert len(set(module.seen)) > 0.9 * len(module.seen)


def collect(trainer, module):
    callback = trainer.callbacks[0]
    return {
        "seen": module.seen,
        "weights": module.state_dict(),
        "state": callback.state_dict(),
        "ratios": list(callback.ratios.values()),
        "epochs": callback.sampler.epochs,
    }


def interrupted(folder, processes, num_workers, steps, at, after_validation=(), batch_size=4, **options):
    """Run to the end, and once more from a checkpoint on the way: return what every rank of both leaves."""
    saving = {"save_on_train_epoch_end": False} if at in after_validation else {"every_n_train_steps": at}
    common = {
        "processes": processes,
        "collect": collect,
        "max_epochs": -1,
        "enable_checkpointing": True,
        **options,
    }

    def start(max_steps, ckpt_path=None):
        callbacks = [
            DomainReweighting(seed=3, ratios=[0.2, 0.3, 0.5]),
            ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **saving),
        ]
        data = Data(num_workers, batch_size=batch_size)
        loaders = (data.train_dataloader(), data.val_dataloader())
        return run(folder, Net(), *loaders, callbacks=callbacks, max_steps=max_steps, ckpt_path=ckpt_path, **common)

    whole = start(steps)
    path = folder / f"step={at}.ckpt"
    torch.load(path, weights_only=True)
    rest = start(steps, path)
    return whole, rest


def check_resumed(whole, rest, batch_size, at):
    for one, other in zip(whole, rest, strict=True):
        assert one["seen"][at * batch_size :] == other["seen"]
        assert one["state"] == other["state"]
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
        assert all(0 < ratio < 1 for ratio in one["ratios"])
    assert len({str(one["state"]["mixer"]) for one in whole}) == 1
    assert len({str(one["state"]["sampler"]) for one in whole}) == 1


@pytest.mark.parametrize("at", [35, 30])
def test_a_resumed_training_gets_the_samples_it_would_have_got(tmp_path, at):
    options = {"val_check_interval": 10, "check_val_every_n_epoch": None}
    whole, rest = interrupted(tmp_path, 1, 0, 60, at, after_validation=[30], **options)
    check_resumed(whole, rest, 4, at)
    assert len(whole[0]["state"]["mixer"]["points"]) == 6


@pytest.mark.parametrize("at", [12, 20, 24])
def test_an_epoch_cut_short_is_resumed_too(tmp_path, at):
    # a break within an epoch, at the end of one, and within the next
    # of 27 batches per epoch, so that what is left of one would not do for the next
    options = {"batch_size": 40, "limit_train_batches": 20}
    whole, rest = interrupted(tmp_path, 1, 0, 50, at, after_validation=[20], **options)
    check_resumed(whole, rest, 40, at)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"limit_train_batches": 30}, {"val_check_interval": 11}])
def test_three_samples_two_workers_two_processes(tmp_path, options):
    if "val_check_interval" in options:
        options["check_val_every_n_epoch"] = None
    # a validation every 11 batches starts workers anew: fewer of them show the same
    num_steps = 100 if "val_check_interval" in options else 200
    whole, rest = interrupted(tmp_path, 2, 2, num_steps, 43, use_distributed_sampler=True, **options)
    check_resumed(whole, rest, 4, 43)
    assert whole[0]["ratios"] == whole[1]["ratios"]
    assert whole[0]["epochs"][2] > num_steps // 10
    # both ranks together follow the one stream: within a pass nothing is repeated
    together = [place for pair in zip(whole[0]["seen"], whole[1]["seen"], strict=True) for place in pair]
    small = [place for place in together if place >= 20_000]
    assert all(len(set(small[first : first + 3])) == 3 for first in range(0, len(small) - 3, 3))
    middle = [place for place in together if 10_000 <= place < 20_000]
    assert len(set(middle[:50])) == 50


def test_losses_that_are_not_finite_leave_the_ratios(tmp_path):
    callback = DomainReweighting("static_dro")
    kept = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_):
            kept.append(list(callback.ratios.values()))

    with pytest.warns(RobustDistWarning, match=r"not finite \(1 nan\)"):
        fit(tmp_path, callback, Net(spoiled=(1,)), callbacks=[Look()])
    assert kept[15] == kept[25] != kept[5]
    assert kept[35] != kept[25]


@pytest.mark.parametrize("every", [1, 3])
def test_every_n_validations(tmp_path, every):
    logger = Memory()
    fit(tmp_path, DomainReweighting("sheared", every_n_validations=every), logger=logger, max_steps=60)
    assert len(logger.values("domains/ratio/0")) == 6 // every


def test_classes_as_domains_by_robust_accuracy(tmp_path):
    callback = DomainReweighting(
        "static_dro", "robust/loader{index}_acc", mode="max", domain_ids=1, domain_names=["no", "yes"]
    )
    evaluation = RobustEvaluation({"fgsm": FGSM(eps=0.1, bounds=None)})
    x, y, ids = part(0, 60, 1).tensors
    train = DataLoader(TensorDataset(x, y, ids), batch_size=6, shuffle=True)
    val = [DataLoader(TensorDataset(x[y == label], y[y == label]), batch_size=8) for label in (0, 1)]
    trainer = make_trainer(default_root_dir=tmp_path, max_epochs=3, callbacks=[evaluation, callback])
    trainer.fit(Net(), train, val)
    accuracies = [score.robust_acc for score in evaluation.result.loaders]
    assert [1 - float(trainer.callback_metrics[f"domains/loss/{name}"]) for name in ("no", "yes")] == pytest.approx(
        accuracies
    )
    worse = "no" if accuracies[0] < accuracies[1] else "yes"
    assert callback.ratios[worse] == max(callback.ratios.values())


@pytest.mark.slow
def test_the_example_on_four_domains_of_text(monkeypatch, tmp_path):
    source, folder = write_source(tmp_path), write_tokenizer(tmp_path / "model")
    tiny_bert(vocab_size=100, num_labels=2).save_pretrained(folder)
    monkeypatch.setattr(domain_reweighting, "METHODS", ("constant", "dro"))
    sizes = {"num_train": 16, "num_val": 4, "num_test": 4, "batch_size": 8}
    results = domain_reweighting.main(folder, source, max_steps=6, **sizes)
    assert results.keys() == {"constant", "dro"}
    assert all(len(losses) == 4 and all(0 < loss < 10 for loss in losses) for losses in results.values())
    assert len((ROOT / "examples" / "domain_reweighting.py").read_text().splitlines()) < 80


# --- wrong input


class Stream(IterableDataset):
    def __iter__(self):
        return iter([part(0, 1, 0)[0]])


@pytest.mark.parametrize(
    ("options", "data", "trainer", "message"),
    [
        ({}, {"num_val": 2}, {}, "3 domains .*and 2 validation loaders"),
        ({"monitor": "loss_{name}"}, {}, {}, "logged no loss_0, loss_1, loss_2; it logged .*val_loss/dataloader_idx_0"),
        ({}, {}, {"limit_val_batches": 0}, "needs validation"),
        ({"domain_names": ["a", "b"]}, {}, {}, "domain 2, but there are only 2"),
        ({"domain_names": ["a", "b", "c", "d"]}, {}, {}, "no sample of domain 3"),
        ({"reference": [1.0, 2.0]}, {}, {}, "domain 2, but there are only 2"),
        ({"domain_ids": "topic"}, {}, {}, "'topic' is neither"),
        ({}, {}, {"max_steps": -1, "max_epochs": -1}, "needs the length of training"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, options, data, trainer, message):
    with pytest.raises(UsageError, match=message):
        fit(tmp_path, DomainReweighting(**options), data=Data(**data), **trainer)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream()), "iterable"),
        ([1, 2, 3], "torch DataLoader"),
        (DataLoader(part(0, 8, 0), batch_sampler=[[0, 1]]), "domain_ids is not set"),
        ([DataLoader(part(0, 8, 0)), DataLoader(part(1, 9, 0))], "domain_ids"),
    ],
)
def test_loaders_that_cannot_be_drawn_from_are_refused(tmp_path, loader, message):
    trainer = make_trainer(default_root_dir=tmp_path, callbacks=[DomainReweighting()])
    with pytest.raises(UsageError, match=message):
        trainer.fit(Net(), loader, Data().val_dataloader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method='best'"),
        ({"rho": 0}, "rho=0"),
        ({"mode": "least"}, "mode='least'"),
        ({"every_n_validations": 0}, "every_n_validations=0"),
        ({"domain_names": ["a"], "ratios": [1, 2]}, "1 domain_names, 2 ratios"),
        ({"ratios": [1, -2]}, "positive"),
        ({"reference": [1, float("inf")]}, "finite"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DomainReweighting(**options)


def test_a_sampler_of_the_users_own_names_the_domains(tmp_path):
    x, y, ids = part(0, 40, 1).tensors
    train = TensorDataset(x, y, ids)
    sampler = DomainSampler([0] * 30 + [1] * 10)
    callback = DomainReweighting("constant", ratios=[0.5, 0.5])
    trainer = make_trainer(default_root_dir=tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(Net(), DataLoader(train, batch_size=4, sampler=sampler))
    assert callback.sampler.sizes == [30, 10]
    assert sum(callback.sampler.counts) == 40
