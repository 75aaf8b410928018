"""Loaders that bring their own idea of who sees what."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from robustdist.attacks import PGD
from robustdist.callbacks import RobustEvaluation
from robustdist.errors import RobustDistWarning

from .support import EPS, Classifier, run


def evaluated(folder, make_loader, **options):
    """Return samples counted and whether the evaluation claims that each was counted once."""

    class Own(Classifier):
        def val_dataloader(self):
            return make_loader(self.trainer.global_rank)

    evaluation = RobustEvaluation({"pgd": PGD(eps=EPS, steps=1)})

    def collect(trainer, module):
        result = evaluation.result
        return result.num_samples, result.checks["counted_once"].passed

    return run(
        folder,
        Own(),
        verb="validate",
        callbacks=[evaluation],
        collect=collect,
        use_distributed_sampler=False,
        **options,
    )


def test_a_data_set_that_every_process_holds_is_shared_out(tmp_path, images):
    data = TensorDataset(*images(10))
    assert evaluated(tmp_path, lambda rank: DataLoader(data, batch_size=4), processes=2) == [(10, True)] * 2


def test_the_share_that_each_process_brings_is_counted_whole(tmp_path, images):
    data = TensorDataset(*images(20))

    def own_half(rank):
        return DataLoader(Subset(data, range(rank, 20, 2)), batch_size=4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RobustDistWarning)
        # both counted; whether they overlap only the user knows, so it is not claimed
        assert evaluated(tmp_path, own_half, processes=2) == [(20, False)] * 2


def test_a_sampler_that_repeats_is_not_claimed(tmp_path, images):
    x, y = images(8)
    sampler = WeightedRandomSampler(torch.ones(8), 12)
    with pytest.warns(RobustDistWarning, match="cannot tell how the sampler spreads"):
        found = evaluated(tmp_path, lambda rank: DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler))
    assert found == [(12, False)]
