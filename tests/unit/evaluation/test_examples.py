"""The samples that an evaluation keeps for the eye."""

from __future__ import annotations

import torch

from robustdist.evaluation import RobustTally

from .support import Breaks, Echo, Shifted, images, tally_of

# --- examples


def test_examples_show_the_first_attack_that_worked():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0])  # the last one is wrong already
    tally = tally_of({"a": Breaks(0), "b": Breaks(0, 1, by=2), "c": Breaks()}, Echo(), x, y, num_examples=10)
    found = tally.examples
    assert torch.equal(found.x, x)
    assert (found.y, found.predicted, found.predicted_adv) == ([0, 1, 2, 0], [0, 1, 2, 3], [1, 3, 2, 3])
    torch.testing.assert_close(found.x_adv, torch.stack([x[0].roll(1), x[1].roll(2), x[2], x[3]]))


def test_examples_show_the_first_attack_where_none_worked():
    moves = Shifted(0.01, eps=0.1, step_size=0, random_start=False)
    x = images([0])
    for named, shift in (({"a": moves, "b": Breaks()}, 0.01), ({"b": Breaks(), "a": moves}, 0.0)):
        found = tally_of(named, Echo(), x, torch.tensor([0]), num_examples=1).examples
        torch.testing.assert_close(found.x_adv, x + shift)


def test_only_as_many_examples_are_kept_as_asked_for():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    module = Echo()
    tally = RobustTally({"a": Breaks()}, num_examples=3)
    tally.update(module, module, x, y, [None, 1, None, 3])
    tally.update(module, module, x, y, [4, 5, 6, 7])
    assert tally.examples.y == [1, 3, 0]
    assert tally_of({"a": Breaks()}, Echo(), x, y).examples is None


def test_examples_are_in_pixel_units_and_on_the_cpu():
    pixels, y = images([0, 1]), torch.tensor([0, 1])
    attack = Breaks(0, mean=0.5, std=0.25)
    tally = tally_of({"a": attack}, Echo(), (pixels - 0.5) / 0.25, y, num_examples=2)
    torch.testing.assert_close(tally.examples.x, pixels)
    torch.testing.assert_close(tally.examples.x_adv[0], pixels[0].roll(1))
