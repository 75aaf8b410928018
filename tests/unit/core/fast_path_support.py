"""A network with everything that the fast path can replace."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from robustdist.core.fast_path import FastPath


class Net(nn.Module):
    """A pair, a shortcut whose norm cannot be folded, a norm before its convolution, dropout."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.dropout = nn.Dropout(0.3)
        self.linear = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        y = self.conv2(x)
        x = self.conv3(F.relu(self.norm3(self.norm2(y) + y)))
        return self.linear(self.dropout(x.mean((2, 3))))


def make_net():
    torch.manual_seed(3)
    net = Net()
    for norm in (net.norm1, net.norm2, net.norm3):
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 1.5)
    return net


X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


Y = torch.tensor([0, 1, 2, 3, 4, 0])


EVERYTHING = {"precision": "bf16", "channels_last": True, "fold_batch_norm": True}


def prepared(net, **options):
    fast_path = FastPath(**options)
    fast_path.prepare(net, X)
    return fast_path
