"""The budget of an attack on sequences: padding lends no length."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import Problem, TokenPGD
from robustdist.evaluation import RobustTally


@dataclass
class Masked:
    net: nn.Module
    mask: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.net((x * self.mask[..., None]).sum(1))


class Overshoots(TokenPGD):
    """Goes beyond its radius by a fifth."""

    def _finish(self, x_adv: Tensor, problem: Problem) -> Tensor:
        return problem.x + 1.2 * (super()._finish(x_adv, problem) - problem.x)


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "passed"), [(TokenPGD, True), (Overshoots, False)])
def test_long_padding_does_not_hide_a_broken_budget(kind, passed, per):
    x = torch.randn(6, 5, 4)
    x[:, 3:] = 50.0  # what a model has at padding may be longer than all words together
    mask = torch.arange(5).expand(6, 5) < 3
    net = nn.Linear(4, 3)
    forward = Masked(net, mask)
    tally = RobustTally({"token": kind(eps=0.1, per=per)})
    tally.update(net, forward, x, forward(x).argmax(1), range(6), whole_batch=True)
    assert tally.result().checks["budget"].passed is passed
