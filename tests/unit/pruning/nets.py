"""Small networks whose groups are known."""

import torch
from torch import nn

from robustdist.pruning.groups import Member, UnitGroup


class Residual(nn.Module):
    """Two blocks on one residual stream, a depthwise and a grouped convolution, a flatten in front of the head."""

    def __init__(self, width=8, num_classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=2)
        self.head = nn.Linear(width * 16, num_classes)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x + self.conv2(torch.sigmoid(self.norm1(self.conv1(x))))
        x = self.grouped(torch.tanh(self.depthwise(x)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


def mlp(width=6, num_inputs=4, num_classes=3):
    """A linear layer, an activation with f(0) != 0, a linear layer."""
    return nn.Sequential(nn.Linear(num_inputs, width), nn.Sigmoid(), nn.Linear(width, num_classes))


def mlp_group(width=6):
    units = torch.arange(width)
    places = [("0.weight", 0, "producer"), ("0.bias", 0, "producer"), ("2.weight", 1, "consumer")]
    return UnitGroup("0", "channels", width, tuple(Member(name, dim, units, role) for name, dim, role in places))


def unsettled(module, seed=0):
    """Norms, biases and statistics with values that show a permutation."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.data = (0.5 + torch.rand(tensor.shape, generator=generator)).to(tensor)
    return module
