import torch
from torch import nn

from robustdist.core.layout import channels_last_weights


def order(parameter):
    return parameter.is_contiguous(memory_format=torch.channels_last)


def test_four_dimensional_weights_change_order_and_nothing_else():
    net = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Linear(5, 2), nn.Conv2d(3, 4, 3)])
    with torch.no_grad():
        net[3].weight.data = net[3].weight.data.contiguous(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    identities = [id(parameter) for parameter in net.parameters()]
    with channels_last_weights(net):
        assert order(net[0].weight)
        assert order(net[3].weight)
        assert net[1].weight.is_contiguous()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not order(net[0].weight)
    assert order(net[3].weight)  # as the user had it
    assert [id(parameter) for parameter in net.parameters()] == identities
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
