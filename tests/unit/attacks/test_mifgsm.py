"""Momentum iterative FGSM against torchattacks."""

from __future__ import annotations

import pytest
import torch

from robustdist.attacks import MIFGSM, PGD


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_equals_torchattacks(task, require, decay):
    require("torchattacks")
    import torchattacks

    net, x, y = task
    expected = torchattacks.MIFGSM(net, eps=0.1, alpha=0.02, steps=5, decay=decay)(x, y)
    x_adv = MIFGSM(eps=0.1, steps=5, decay=decay)(net, x, y)
    # rounding may turn the sign of a mean that is next to zero
    assert float(((x_adv - expected).abs() > 1e-6).float().mean()) < 1e-3
    assert float((x_adv - x).abs().mean()) > 0.05


def test_without_decay_it_is_pgd_from_the_clean_image(task):
    net, x, y = task
    expected = PGD(eps=0.1, step_size=0.02, steps=5, random_start=False)(net, x, y)
    assert torch.equal(MIFGSM(eps=0.1, steps=5, decay=0.0)(net, x, y), expected)
    assert not torch.equal(MIFGSM(eps=0.1, steps=5, decay=1.0)(net, x, y), expected)
