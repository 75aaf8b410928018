"""Steps onto hyperplanes that the image box does not reach."""

from __future__ import annotations

import pytest
import torch

from robustdist.attacks.hyperplane import shortest_step


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_an_unreachable_hyperplane_gives_the_corner_nearest_to_it(norm):
    x, w = torch.full((1, 4), 0.5), torch.tensor([[1.0, 0.0, 1e-3, -2.0]])
    step = shortest_step(x, w, torch.tensor([100.0]), norm, (0.0, 1.0))
    assert torch.equal(step, torch.tensor([[0.5, 0.0, 0.5, -0.5]]))
