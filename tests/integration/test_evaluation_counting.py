"""Every image once, whatever the processes, loaders and batches."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from robustdist.attacks import FGSM, PGD
from robustdist.attacks.base import Attack
from robustdist.callbacks import RobustEvaluation

from .evaluation_support import GREY, RADIUS, Threshold, counts, evaluate, expected, grey, numbers
from .support import Classifier, Memory, loader, trained_net


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
    assert single == (expected(GREY), False)  # it might hand out a sample twice


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
            if "reverse" in options:  # the waterfall follows the order
                assert result.pop("waterfall")[-1]["num_robust"] == one["waterfall"][-1]["num_robust"]
            assert result == {key: one[key] for key in result}, options
    # the numbers do depend on the draws
    others = [measure(processes=1, seed=seed)[0]["attacks"]["weak"]["acc"] for seed in range(1, 5)]
    assert any(other != one["attacks"]["weak"]["acc"] for other in others)
