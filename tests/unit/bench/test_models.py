from __future__ import annotations

import pytest
import torch
from torch import nn

from robustdist.bench.models import PreActResNet, ResNet
from robustdist.core.fast_path import FastPath


@pytest.mark.parametrize("kind", [PreActResNet, ResNet])
def test_shape_and_depth(kind):
    model = kind(width=4, num_classes=7)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len([conv for conv in convolutions if conv.kernel_size == (3, 3)]) == 17
    assert len([conv for conv in convolutions if conv.kernel_size == (1, 1)]) == 3
    assert sorted({conv.out_channels for conv in convolutions}) == [4, 8, 16, 32]


@pytest.mark.parametrize("kind", [PreActResNet, ResNet])
def test_multiply_adds_at_the_default_width(kind):
    macs = 0

    def count(module, inputs, output):
        nonlocal macs
        macs += output[0].numel() * module.weight[0].numel()

    model = kind().eval()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    model(torch.rand(1, 3, 32, 32))
    assert macs == pytest.approx(35e6, rel=0.02)


@pytest.mark.parametrize(("kind", "num_folded", "num_norms"), [(PreActResNet, 8, 17), (ResNet, 20, 20)])
def test_which_batch_norms_fold(kind, num_folded, num_norms):
    fast_path = FastPath(fold_batch_norm=True)
    fast_path.prepare(kind(width=4), torch.rand(2, 3, 32, 32))
    assert (fast_path.num_folded, fast_path.num_norms) == (num_folded, num_norms)
