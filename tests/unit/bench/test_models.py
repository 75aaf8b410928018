from __future__ import annotations

import pytest
import torch
from torch import nn

from robustdist.bench.models import PreActResNet


def test_shape_and_depth():
    model = PreActResNet(width=4, num_classes=7)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len([conv for conv in convolutions if conv.kernel_size == (3, 3)]) == 17
    assert len([conv for conv in convolutions if conv.kernel_size == (1, 1)]) == 3
    assert sorted({conv.out_channels for conv in convolutions}) == [4, 8, 16, 32]


def test_multiply_adds_at_the_default_width():
    macs = 0

    def count(module, inputs, output):
        nonlocal macs
        macs += output[0].numel() * module.weight[0].numel()

    model = PreActResNet().eval()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    model(torch.rand(1, 3, 32, 32))
    assert macs == pytest.approx(35e6, rel=0.02)
