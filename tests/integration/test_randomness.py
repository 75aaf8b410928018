"""Random starts: new for every rank, step and epoch, the same in every repetition, and apart from the training's."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from robustdist.attacks import PGD, TorchAttack
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.objectives import DAT, PGDAT

from .support import Classifier, identical, loader, seeded_net


def starts(launch, seed=0, processes=2, objective=None, **options):
    """Return, per rank, what was added to each image of each step; all images are the same grey one."""
    x, y = torch.full((16, 1, 6, 6), 0.5), torch.arange(16) % 4
    attack = PGD(eps=0.25, steps=1, step_size=0.0, random_start=True, seed=seed)

    def collect(trainer, module):
        return torch.cat(module.seen) - 0.5

    return launch(
        Classifier(),
        loader(x, y, batch_size=2),
        processes=processes,
        max_epochs=3,
        callbacks=[AdversarialTraining(objective, attack)],
        collect=collect,
        **options,
    )


def test_no_start_is_drawn_twice(launch):
    ranks = starts(launch)
    rows = torch.cat(ranks).flatten(1)
    assert len(rows) == 2 * 3 * 8
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    # and they fill the ball, on both ranks
    for rank in ranks:
        assert 0.24 < rank.abs().max() <= 0.25
        assert abs(float(rank.mean())) < 0.02


def test_starts_repeat_with_the_seed_and_change_with_it(launch):
    first, again = starts(launch), starts(launch)
    assert torch.equal(torch.stack(first), torch.stack(again))
    other = starts(launch, seed=1)
    assert not (torch.stack(first) == torch.stack(other)).any(dim=-1).any()


def test_seed_everything_does_not_make_ranks_equal(launch):
    pl.seed_everything(7, workers=True, verbose=False)
    ranks = starts(launch)
    assert not (ranks[0] == ranks[1]).any()


def test_accumulation_draws_for_every_micro_batch(launch):
    rows = torch.cat(starts(launch, accumulate_grad_batches=4)).flatten(1)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


class Drawing(Classifier):
    """Draws random numbers of its own in every step."""

    def __init__(self):
        super().__init__(seeded_net(dropout=0.5))
        self.draws: list[float] = []

    def on_fit_start(self):
        # in the worker: a forked process gets another state of `random`
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    def training_step(self, batch, batch_idx):
        self.draws += [torch.rand(()).item(), random.random(), float(np.random.rand())]
        self.draws.append(float(batch[2].sum()))  # which samples the shuffling loader chose
        return F.cross_entropy(self(batch[0]), batch[1])


def draws(launch, images, callbacks, processes=1):
    x, y = images(32)
    return launch(
        Drawing(),
        DataLoader(torch.utils.data.TensorDataset(x, y, torch.arange(32) ** 2), batch_size=4, shuffle=True),
        loader(x, y),
        processes=processes,
        max_epochs=3,
        num_sanity_val_steps=1,
        callbacks=callbacks,
        collect=lambda trainer, module: (module.draws, module.state_dict()),
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_robust_validation_changes_no_draw_and_no_weight(launch, images, require, processes):
    require("torchattacks")
    plain = draws(launch, images, [], processes)
    # APGD of torchattacks seeds the global generators
    attacks = {"pgd": PGD(eps=0.1, steps=2), "apgd": TorchAttack("APGD", eps=0.1, steps=3)}
    evaluated = draws(launch, images, [RobustEvaluation(attacks)], processes)
    for without, with_evaluation in zip(plain, evaluated, strict=True):
        assert without[0] == with_evaluation[0]
        assert identical(without[1], with_evaluation[1])


@pytest.mark.parametrize("objective", [PGDAT(), DAT(clean_weight=0.0)])
@pytest.mark.parametrize("model_mode", ["eval", "train"])
def test_the_attack_changes_no_draw_of_the_training(launch, images, objective, model_mode):
    ((plain, before),) = draws(launch, images, [])
    attack = PGD(eps=0.1, steps=2, restarts=2, model_mode=model_mode)
    ((attacked, after),) = draws(launch, images, [AdversarialTraining(objective, attack)])
    assert plain == attacked
    assert not identical(before, after)
