"""What is found out about a forward pass: does it repeat itself, does it differentiate inside?"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.autograd import grad as bound_before

from robustdist.attacks import PGD
from robustdist.core.testing import TinyNet, toy_images
from robustdist.evaluation.forwards import calls_autograd, repeat_forward

from .support import Echo, check, images, tally_of


class Purifies(Echo):
    """Takes a gradient step on its input before it answers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x):
        with torch.enable_grad():
            moved = x.detach().clone().requires_grad_()
            energy = super().forward(moved).logsumexp(1).sum()
            if self.how == "backward":
                energy.backward()
                step = moved.grad
            elif self.how == "func":
                step = torch.func.grad(lambda pixels: (pixels**2).sum())(x.detach())
            elif self.how == "bound":
                (step,) = bound_before(energy, moved)
            else:
                (step,) = torch.autograd.grad(energy, moved)
        return super().forward(x + 0.01 * step)


@pytest.mark.parametrize("how", ["grad", "backward", "func", "bound"])
def test_differentiation_inside_the_forward_is_found(how):
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    assert calls_autograd(Purifies(how), Purifies(how), x)
    assert not check(tally_of({"a": PGD(eps=0.01, steps=1)}, Purifies(how), x, y), "plain_forward")


def test_an_ordinary_forward_differentiates_nothing():
    net = TinyNet(batch_norm=True, dropout=0.5)
    x, _ = toy_images(3)
    events = []

    def profile(frame, event, argument):
        events.append(event)

    sys.setprofile(profile)
    try:
        assert not calls_autograd(net, net, x)
        assert sys.getprofile() is profile, "a profiler of the user goes on"
    finally:
        sys.setprofile(None)
    assert events


def test_a_failing_forward_gives_the_profiler_back():
    def fails(x):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        calls_autograd(TinyNet(), fails, torch.zeros(1, 1, 6, 6))
    assert sys.getprofile() is None


class Drifts(nn.Module):
    """Adds ``step`` to the first logit of the second row at every pass."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step, self.passes = step, 0

    def forward(self, x):
        self.passes += 1
        return torch.tensor([[-4.0, 2.0], [self.step * (self.passes - 1), 1.0]]) * (1 + 0 * x.sum())


@pytest.mark.parametrize(("step", "changed"), [(0.0, 0), (0.1, 0), (0.3, 1)])
def test_the_spread_is_that_of_the_worst_pass_relative_to_the_largest_logit(step, changed):
    net = Drifts(step)
    found = repeat_forward(net, net, torch.zeros(2, 1))
    assert net.passes == 5
    assert found.spread == pytest.approx(4 * step / 4)
    assert found.num_changed == changed


def test_rounding_of_the_device_is_no_randomness():
    x, y = images([0, 1]), torch.tensor([0, 1])

    class Rounds(Echo):
        passes = 0

        def forward(self, x):
            self.passes += 1
            return super().forward(x) * (1 + 1e-6 * (self.passes % 2))

    assert check(tally_of({"a": PGD(eps=0.01, steps=1)}, Rounds(), x, y), "deterministic")
