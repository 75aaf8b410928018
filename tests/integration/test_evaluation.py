"""Robust accuracy of a real Trainer: every image once, whatever the processes, loaders and batches."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from robustdist.attacks import FGSM, PGD
from robustdist.attacks.base import Attack
from robustdist.callbacks import RobustEvaluation
from robustdist.core.testing import toy_images
from robustdist.errors import UsageError

from .support import Classifier, Memory, identical, loader, make_trainer, run, seeded_net, trained_net

# Grey images (one value each) with labels. A threshold at 0.5 and a radius of 0.1 decide them without any attack:
# index 0 is right and robust, so that counting it twice shows in both accuracies.
GREY = [(0.9, 1), (0.1, 1), (0.55, 1), (0.1, 0), (0.9, 0), (0.45, 0), (0.2, 0), (0.58, 1)]
RADIUS = 0.1


class Threshold(nn.Module):
    """Says 1 for images brighter than a half."""

    def forward(self, x):
        brightness = x.flatten(1).mean(1) - 0.5
        return 10 * torch.stack([-brightness, brightness], dim=1)


def grey(rows):
    values = torch.tensor([value for value, _ in rows])
    return values.view(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone(), torch.tensor([label for _, label in rows])


def expected(rows):
    clean = [(value > 0.5) == bool(label) for value, label in rows]
    robust = [right and abs(value - 0.5) > RADIUS for right, (value, _) in zip(clean, rows, strict=True)]
    return {"num_samples": len(rows), "num_clean": sum(clean), "num_robust": sum(robust)}


def counts(trainer, module):
    result = trainer.callbacks[0].result
    return {name: getattr(result, name) for name in ("num_samples", "num_clean", "num_robust")}


def evaluate(launch, *loaders, collect=counts, attacks=None, verb="validate", processes=2, net=None, **options):
    ours = {key: options.pop(key) for key in ("max_samples", "every_n_epochs", "num_examples") if key in options}
    evaluation = RobustEvaluation(attacks or {"pgd": PGD(eps=RADIUS, steps=3)}, **ours)
    module = Classifier(net if net is not None else Threshold())
    return launch(module, *loaders, verb=verb, collect=collect, processes=processes, callbacks=[evaluation], **options)


def test_the_table_of_grey_images_is_what_its_comment_says():
    assert expected(GREY[:5]) == {"num_samples": 5, "num_clean": 3, "num_robust": 2}
    assert expected(GREY[:1]) == {"num_samples": 1, "num_clean": 1, "num_robust": 1}


@pytest.mark.parametrize("distributed_sampler", [True, False])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(5, 2), (5, 1), (5, 5), (1, 2), (7, 3), (8, 3)])
def test_each_sample_counts_once_on_two_processes(launch, num_samples, batch_size, distributed_sampler):
    rows = GREY[:num_samples]
    ranks = evaluate(launch, loader(*grey(rows), batch_size=batch_size), use_distributed_sampler=distributed_sampler)
    assert ranks == [expected(rows)] * 2


@pytest.mark.parametrize("verb", ["validate", "test"])
@pytest.mark.parametrize("processes", [1, 2])
def test_accuracies_are_returned_and_logged(launch, verb, processes):
    logger = Memory()

    def collect(trainer, module):
        return {key: float(value) for key, value in trainer.callback_metrics.items()}, logger.entries

    ranks = evaluate(
        launch, loader(*grey(GREY[:5]), batch_size=2), verb=verb, processes=processes, collect=collect, logger=logger
    )
    for metrics, _ in ranks:
        assert metrics["robust/acc"] == metrics["robust/pgd_acc"] == pytest.approx(2 / 5)
        assert metrics["robust/clean_acc"] == pytest.approx(3 / 5)
        # Wilson's interval for 2 of 5, from the table of any textbook
        assert metrics["robust/acc_low"] == pytest.approx(0.1176, abs=1e-4)
        assert metrics["robust/acc_high"] == pytest.approx(0.7693, abs=1e-4)
    (logged,) = (entry for entry in ranks[0][1] if "robust/acc" in entry)
    assert logged["robust/acc"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(("max_samples", "processes"), [(3, 1), (3, 2), (1, 2), (4, 2), (100, 2)])
@pytest.mark.parametrize("distributed_sampler", [True, False])
def test_max_samples_takes_the_first_ones(launch, max_samples, processes, distributed_sampler):
    ranks = evaluate(
        launch,
        loader(*grey(GREY), batch_size=2),
        processes=processes,
        max_samples=max_samples,
        use_distributed_sampler=distributed_sampler,
    )
    assert ranks == [expected(GREY[:max_samples])] * processes


@pytest.mark.parametrize("container", [list, lambda loaders: dict(zip("ab", loaders, strict=True))])
@pytest.mark.parametrize("processes", [1, 2])
def test_several_loaders_are_counted_together(launch, container, processes):
    loaders = [loader(*grey(GREY[:5]), batch_size=2), loader(*grey(GREY[5:]), batch_size=3)]
    assert evaluate(launch, container(loaders), processes=processes) == [expected(GREY)] * processes
    assert (
        evaluate(launch, container(loaders), processes=processes, max_samples=2)
        == [expected(GREY[:2] + GREY[5:7])] * processes
    )


def test_a_sampler_of_the_user_is_understood(launch):
    class Sampled(Classifier):
        def val_dataloader(self):
            x, y = grey(GREY[:5])
            data = torch.utils.data.TensorDataset(x, y)
            return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, seed=4))

    evaluation = RobustEvaluation({"pgd": PGD(eps=RADIUS, steps=3)})
    ranks = launch(Sampled(Threshold()), verb="validate", processes=2, callbacks=[evaluation], collect=counts)
    assert ranks == [expected(GREY[:5])] * 2


class Pairs:
    """A batch sampler that is none of torch's."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        yield from ([place, place + 1] for place in range(0, self.num_samples, 2))

    def __len__(self):
        return self.num_samples // 2


@pytest.mark.filterwarnings("ignore:RobustEvaluation cannot tell")
def test_an_unknown_sampler_is_said_and_marked(launch):
    def collect(trainer, module):
        check = trainer.callbacks[0].result.checks["counted_once"]
        return counts(trainer, module), check.passed

    x, y = grey(GREY)
    data = DataLoader(torch.utils.data.TensorDataset(x, y), batch_sampler=Pairs(len(x)))
    ranks = evaluate(launch, data, use_distributed_sampler=False, collect=collect)
    # nobody's sample is dropped: both processes walked through everything
    assert ranks == [({name: 2 * number for name, number in expected(GREY).items()}, False)] * 2
    (single,) = evaluate(launch, data, processes=1, collect=collect)
    assert single == (expected(GREY), True)


class Share(Classifier):
    """Gives each process a data set of its own, as people do who shard by hand."""

    def val_dataloader(self):
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return loader(*grey(GREY[rank::world_size]), batch_size=3)


@pytest.mark.filterwarnings("ignore:RobustEvaluation cannot tell")
def test_data_sharded_by_hand_is_counted_whole(launch):
    ranks = launch(
        Share(Threshold()),
        verb="validate",
        processes=2,
        use_distributed_sampler=False,
        callbacks=[RobustEvaluation({"pgd": PGD(eps=RADIUS, steps=3)})],
        collect=lambda trainer, module: (
            counts(trainer, module),
            trainer.callbacks[0].result.checks["counted_once"].passed,
        ),
    )
    assert ranks == [(expected(GREY), False)] * 2


class Shift(Attack):
    """Makes images brighter or darker; each direction breaks other images."""

    def __init__(self, direction, **options):
        super().__init__(eps=RADIUS, **options)
        self.direction = direction

    def perturb(self, problem):
        problem.followed.fill_(True)  # needs no gradient
        return problem.x + self.direction * problem.eps


@pytest.mark.parametrize("processes", [1, 2])
def test_the_worst_case_is_taken_per_image(launch, processes):
    rows = [(0.45, 0), (0.55, 1), (0.9, 1), (0.1, 0), (0.1, 1)]

    def collect(trainer, module):
        return {key: float(value) for key, value in trainer.callback_metrics.items()}

    attacks = {"brighter": Shift(1), "darker": Shift(-1)}
    for metrics in evaluate(
        launch, loader(*grey(rows), batch_size=2), attacks=attacks, processes=processes, collect=collect
    ):
        assert metrics["robust/clean_acc"] == pytest.approx(4 / 5)
        assert metrics["robust/brighter_acc"] == metrics["robust/darker_acc"] == pytest.approx(3 / 5)
        assert metrics["robust/acc"] == pytest.approx(2 / 5)


def numbers(trainer, module):
    found = trainer.callbacks[0].result.to_dict()
    for attack in found["attacks"].values():
        del attack["seconds"]
    return found


def test_random_starts_do_not_depend_on_batches_processes_or_order(launch, images):
    x, y = images(61)
    net = trained_net()

    def measure(seed=0, reverse=False, batch_size=8, **options):
        attacks = {
            "weak": PGD(eps=0.2, steps=1, step_size=0.01, random_start=True, seed=seed),
            "strong": PGD(eps=0.1, steps=2, restarts=2, seed=seed),
            "fgsm": FGSM(eps=0.02),
        }
        if reverse:
            attacks = dict(reversed(attacks.items()))
        return evaluate(
            launch, loader(x, y, batch_size=batch_size), attacks=attacks, net=net, collect=numbers, **options
        )

    (one,) = measure(processes=1)
    assert 0 < one["robust_acc"] < one["clean_acc"]
    assert one["num_samples"] == 61
    for options in (
        {"processes": 1, "batch_size": 1},
        {"processes": 1, "batch_size": 2},
        {"processes": 1, "batch_size": 5, "reverse": True},
        {"processes": 2},
        {"processes": 2, "batch_size": 5, "reverse": True},
        {"processes": 2, "batch_size": 2, "use_distributed_sampler": False},
    ):
        for result in measure(**options):
            assert result == one, options
    # the numbers do depend on the draws
    others = [measure(processes=1, seed=seed)[0]["attacks"]["weak"]["acc"] for seed in range(1, 5)]
    assert any(other != one["attacks"]["weak"]["acc"] for other in others)


def fit(launch, *, processes, net=None, epochs=4, callbacks=(), collect, lr=0.0, **options):
    x, y = grey(GREY[:5])
    ours = {key: options.pop(key) for key in ("every_n_epochs",) if key in options}
    evaluation = RobustEvaluation({"pgd": PGD(eps=RADIUS, steps=3)}, **ours)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.threshold = Threshold()

        def forward(self, x):
            return self.scale * self.threshold(x)

    return launch(
        Classifier(Scaled(), lr=lr),
        loader(x, y, batch_size=2),
        loader(x, y, batch_size=2),
        processes=processes,
        max_epochs=epochs,
        callbacks=[evaluation, *callbacks],
        collect=collect,
        **options,
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("every_n_epochs", [1, 2])
def test_monitors_find_the_robust_accuracy(launch, tmp_path, processes, every_n_epochs):
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="robust/acc", mode="max", save_top_k=1)
    # weights do not move, so no epoch after the first is an improvement, whether it is evaluated or repeats the value
    stopping = EarlyStopping("robust/acc", mode="max", patience=every_n_epochs, strict=True)

    def collect(trainer, module):
        history = trainer.callbacks[0].history
        return trainer.current_epoch, float(checkpoint.best_model_score), [entry["epoch"] for entry in history], history

    ranks = fit(
        launch,
        processes=processes,
        every_n_epochs=every_n_epochs,
        callbacks=[stopping, checkpoint],
        enable_checkpointing=True,
        collect=collect,
    )
    for epochs, best, evaluated, history in ranks:
        assert epochs == 1 + every_n_epochs
        assert best == pytest.approx(0.4)
        assert evaluated == ([1, 2] if every_n_epochs == 1 else [1, 3])
        assert history[0]["acc"] == pytest.approx(0.4)
    assert len(list((tmp_path / "best").iterdir())) == 1


@pytest.mark.parametrize(
    ("every_n_epochs", "options", "epochs", "evaluated"),
    [
        (2, {}, 5, [1, 3, 5]),
        (2, {}, 4, [1, 3, 4]),
        (3, {}, 5, [1, 4, 5]),
        # validation itself happens in epochs 2, 4 and 6 only
        (2, {"check_val_every_n_epoch": 2}, 6, [2, 4, 6]),
        (3, {"check_val_every_n_epoch": 2}, 8, [2, 6, 8]),
        # three times per epoch
        (2, {"val_check_interval": 1}, 3, [1, 1, 1, 3, 3, 3]),
    ],
)
def test_every_n_epochs_logs_once_per_evaluation(launch, every_n_epochs, options, epochs, evaluated):
    logger = Memory()
    seen = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["robust/acc"]))

    (history,) = fit(
        launch,
        processes=1,
        every_n_epochs=every_n_epochs,
        epochs=epochs,
        callbacks=[Watch()],
        logger=logger,
        collect=lambda trainer, module: trainer.callbacks[0].history,
        **options,
    )
    assert [entry["epoch"] for entry in history] == evaluated
    assert len(logger.values("robust/acc")) == len(evaluated)
    assert seen == pytest.approx([0.4] * len(seen))


def test_a_learning_rate_follows_the_robust_accuracy(tmp_path):
    class Plateau(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "robust/acc"}}

    module = Plateau(trained_net(), lr=1e-6)  # nothing improves
    evaluation = RobustEvaluation({"pgd": PGD(eps=RADIUS, steps=3)}, every_n_epochs=2)
    trainer = make_trainer(callbacks=[evaluation], default_root_dir=tmp_path, max_epochs=4)
    x, y = toy_images(16)
    trainer.fit(module, loader(x, y), loader(x, y))
    # the first epoch sets the mark, the other three do not beat it
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-6 / 8)


def test_two_evaluations_need_two_prefixes(launch):
    weak, strong = {"weak": PGD(eps=0.01, steps=1)}, {"strong": PGD(eps=0.45, steps=3)}

    def collect(trainer, module):
        return {key: float(value) for key, value in trainer.callback_metrics.items()}

    with pytest.raises(UsageError, match="prefix"):
        launch(
            Classifier(Threshold()),
            loader(*grey(GREY)),
            verb="validate",
            callbacks=[RobustEvaluation(weak), RobustEvaluation(strong)],
        )
    (metrics,) = launch(
        Classifier(Threshold()),
        loader(*grey(GREY)),
        verb="validate",
        callbacks=[RobustEvaluation(weak), RobustEvaluation(strong, prefix="strong")],
        collect=collect,
    )
    assert metrics["robust/acc"] == metrics["robust/clean_acc"] == metrics["strong/clean_acc"] == pytest.approx(6 / 8)
    assert metrics["strong/acc"] == 0


class Caching(Classifier):
    """Keeps tensors of its last forward and uses them in the next one."""

    def __init__(self, net):
        super().__init__(net)
        self.last = None
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.ones(x.shape[1:])
        if self.last is not None:
            x = x * self.scale + 0.0 * self.last["x"].mean()
        self.last = {"x": x.detach() * self.scale, "none": None}
        self.table = (x * self.scale).sum(0)
        return self.net(x)


class Interrupt(pl.Callback):
    """Fails in the second batch."""

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            raise RuntimeError("stop here")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_module_that_caches_tensors_is_attacked_in_every_stage(launch, images, processes):
    x, y = images(16)
    net = trained_net()

    def collect(trainer, module):
        result = trainer.callbacks[0].result
        return result.num_clean, result.num_robust, result.checks["gradient"].passed

    outcomes = set()
    for verb in ("fit", "validate", "test"):
        evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=3)})
        loaders = (loader(x, y, batch_size=4),) * (2 if verb == "fit" else 1)
        module = Caching(net)
        module.lr = 0.0
        outcomes.update(
            launch(module, *loaders, verb=verb, processes=processes, callbacks=[evaluation], collect=collect)
        )
    assert len(outcomes) == 1
    num_clean, num_robust, followed = outcomes.pop()
    assert num_robust < num_clean
    assert followed


def test_one_trainer_goes_through_all_stages(tmp_path, images):
    x, y = images(16)
    module = Caching(trained_net())
    evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=3)})
    trainer = make_trainer(callbacks=[evaluation], default_root_dir=tmp_path)
    results = []
    for verb in ("validate", "test", "fit", "validate", "test"):
        data = loader(x, y, batch_size=4)
        getattr(trainer, verb)(module, *([data, data] if verb == "fit" else [data]))
        results.append(evaluation.result)
        assert trainer.validate_loop.inference_mode is trainer.test_loop.inference_mode is True
    assert all(result.num_samples == 16 for result in results)
    assert results[0].num_robust == results[1].num_robust < results[0].num_clean
    assert results[2].num_robust == results[3].num_robust == results[4].num_robust


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode_comes_back_after_an_exception(tmp_path, images, inference_mode):
    x, y = images(16)
    evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=1)})
    trainer = make_trainer(
        callbacks=[evaluation, Interrupt()], default_root_dir=tmp_path, inference_mode=inference_mode
    )
    modes = []

    class Watching(Classifier):
        def validation_step(self, batch, batch_idx):
            modes.append(torch.is_inference_mode_enabled())

    with pytest.raises(RuntimeError, match="stop here"):
        trainer.validate(Watching(), loader(x, y, batch_size=4))
    assert modes == [False, False]
    assert trainer.validate_loop.inference_mode is inference_mode
    assert trainer.test_loop.inference_mode is inference_mode


def test_the_module_is_as_before(tmp_path, images):
    x, y = images(16)
    module = Classifier(seeded_net(batch_norm=True, dropout=0.5))
    module.net.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [part.training for part in module.modules()]
    run(
        tmp_path,
        module,
        loader(x, y, batch_size=4),
        verb="validate",
        callbacks=[RobustEvaluation({"pgd": PGD(eps=0.1, steps=3, model_mode="train")})],
    )
    assert identical(before, module.state_dict())
    assert [part.training for part in module.modules()] == flags
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_may_take_its_batch_apart(launch, images, processes):
    x, y = images(8)
    samples = [{"image": image, "label": label} for image, label in zip(x, y, strict=True)]

    class Destructive(Classifier):
        def validation_step(self, batch, batch_idx):
            batch.pop("label")
            batch.pop("image").sub_(3.0)

    def measure(module):
        evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=3)})
        return launch(
            module,
            DataLoader(samples, batch_size=3, sampler=SequentialSampler(samples)),
            verb="validate",
            processes=processes,
            callbacks=[evaluation],
            collect=numbers,
        )

    class Harmless(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    assert measure(Destructive()) == measure(Harmless())
