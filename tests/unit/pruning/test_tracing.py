import copy

import pytest
import torch
from torch import nn

from robustdist.errors import UsageError
from robustdist.pruning import PruningRecipe, compile_recipe, discover, traced_groups
from robustdist.pruning.masks import mask_units
from robustdist.pruning.plan import chosen_groups
from tests.unit.pruning.nets import Residual, unsettled

IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def removed_units(groups, share):
    return {group.name: list(range(0, group.size))[: int(group.size * share)] for group in groups}


def masked_and_small(net, groups, removed):
    """The same network, once masked by a naive rule (only the columns that read the units), once cut."""
    masked, small = copy.deepcopy(net).eval(), copy.deepcopy(net).eval()
    mask_units(masked, groups, removed)
    compile_recipe(small, groups, removed).apply(small)
    return masked, small


def test_the_groups_of_a_residual_net():
    torch.manual_seed(0)
    net = Residual()
    groups = {group.name: group for group in traced_groups(net, IMAGES)}
    assert {name: group.size for name, group in groups.items()} == {"stem.0": 4, "conv1": 8, "grouped": 4}
    places = {(member.tensor, member.dim) for member in groups["stem.0"].members}
    # the residual stream: what makes it, its depthwise layer, and who reads it, a channel from both groups at once
    assert {("stem.0.weight", 0), ("conv2.weight", 0), ("depthwise.weight", 0), ("grouped.weight", 1)} <= places
    columns = next(member for member in groups["grouped"].members if member.tensor == "head.weight")
    # 16 columns for each channel; channels c and c + 4 go together
    assert torch.equal(columns.units, torch.arange(8).repeat_interleave(16) % 4)


def test_masked_is_removed_whatever_the_activation():
    torch.manual_seed(0)
    net = unsettled(Residual())
    groups = discover(net, IMAGES)
    assert len(groups) == 3
    masked, small = masked_and_small(net, groups, removed_units(groups, 0.5))
    assert (masked(IMAGES) - small(IMAGES)).abs().max() <= 1e-5 * masked(IMAGES).abs().max()
    assert (small.depthwise.groups, small.depthwise.in_channels) == (4, 4)
    assert (small.grouped.in_channels, small.grouped.out_channels, small.head.in_features) == (4, 4, 64)
    small(IMAGES).sum().backward()


def test_masking_only_the_readers_is_the_same():
    """A naive judge: the dense net with hooks that zero the units in front of whoever reads them."""
    torch.manual_seed(0)
    net = unsettled(Residual()).eval()
    groups = [group for group in discover(net, IMAGES) if group.name == "conv1"]
    _, small = masked_and_small(net, groups, {"conv1": [0, 3]})
    alive = torch.ones(8).index_fill(0, torch.tensor([0, 3]), 0).view(1, 8, 1, 1)
    net.conv2.register_forward_pre_hook(lambda module, args: args[0] * alive)
    assert torch.allclose(net(IMAGES), small(IMAGES), atol=1e-5)


def test_the_module_is_not_touched():
    net = Residual().train()
    net.conv1.eval()
    net.conv2.weight.requires_grad_(False)
    before, flags = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.inference_mode():
        discover(net, IMAGES)
    assert torch.equal(torch.rand(2), expected)
    assert [module.training for module in net.modules()] == flags
    assert not net.conv2.weight.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_frozen_layers_are_found_and_stay_frozen():
    net = Residual()
    expected = [(group.name, group.size) for group in traced_groups(net, IMAGES)]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    groups = discover(net, IMAGES)
    assert [(group.name, group.size) for group in groups] == expected
    compile_recipe(net, groups, removed_units(groups, 0.5)).apply(net)
    assert [name for name, parameter in net.named_parameters() if parameter.requires_grad] == [
        "head.weight",
        "head.bias",
    ]


class Reused(nn.Module):
    """One layer used twice, and a concatenation of a tensor with itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.last = nn.Conv2d(12, 2, 3)

    def forward(self, x):
        x = self.twice(torch.relu(self.twice(torch.relu(self.first(x)))))
        return self.last(torch.cat([x, x], 1)).mean((2, 3))


class OverGroups(nn.Module):
    """A GroupNorm, whose statistics depend on which channels there are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3)
        self.norm = nn.GroupNorm(3, 6)
        self.second = nn.Conv2d(6, 4, 3)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.second(self.norm(self.first(x))).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.cell, self.hidden, self.last = nn.Linear(8, 6), nn.LSTM(6, 5), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.hidden(self.cell(torch.relu(self.first(x[:, 0])))[0]))).mean(1)


class FixedWidth(nn.Module):
    """A width written into the code, which no graph shows."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 6), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.relu(self.first(x.flatten(1)))
        return self.last(torch.relu(self.second(x.view(-1, 6))))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Reused, {"first"}),
        (OverGroups, {"second"}),
        (Recurrent, {"hidden"}),
        (FixedWidth, {"second"}),
    ],
)
def test_what_cannot_lose_channels_is_left_whole(make, expected):
    torch.manual_seed(0)
    net = unsettled(make())
    groups = discover(net, IMAGES)
    assert {group.name for group in groups} == expected
    masked, small = masked_and_small(net, groups, removed_units(groups, 0.5))
    assert torch.allclose(masked(IMAGES), small(IMAGES), atol=1e-5)


def test_a_model_that_does_not_run_is_refused():
    with pytest.raises(UsageError, match=r"Linear cannot be traced \(RuntimeError.*give example"):
        discover(nn.Linear(3, 2), IMAGES)


@pytest.mark.slow
def test_parts_that_cannot_be_traced_are_named_and_left_whole_if_asked():
    from torchvision.models import ShuffleNetV2

    torch.manual_seed(0)
    net, images = unsettled(ShuffleNetV2([4, 8, 4], [8, 16, 24, 32, 48], 5)), torch.randn(2, 3, 32, 32)
    message = (
        r"ShuffleNetV2 cannot be traced in stage2, stage3, stage4 \(ZeroDiv.*ignore=\['stage2', 'stage3', 'stage4'\]"
    )
    for ignore in ([], ["conv5*"], ["stage2"]):
        with pytest.raises(UsageError, match=message):
            discover(net, images, ignore=ignore)
    refused: dict[str, str] = {}
    groups = discover(net, images, ignore=["stage*"], refused=refused)
    assert [(group.name, group.size) for group in groups] == [("conv5.0", 48)]
    assert list(refused) == ["stage2", "stage3", "stage4"]
    assert [group.name for group in chosen_groups(groups, ["stage*"], refused)] == ["conv5.0"]
    masked, small = masked_and_small(net, groups, removed_units(groups, 0.5))
    assert torch.allclose(masked(images), small(images), atol=1e-5)
    # in one that does not run the part that fails is named; there is nothing that ignore could do
    with pytest.raises(UsageError, match=r"cannot be traced in conv1.0 \(RuntimeError.*give example"):
        discover(net, torch.randn(2, 1, 32, 32), ignore=["conv1"])


class Shuffle(nn.Module):
    """Mixes halves of the channels, of which torch-pruning makes more than there are."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width // 2, width // 2, 1)

    def forward(self, x):
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.conv(right)], 1)
        return x.unflatten(1, (2, x.shape[1] // 2)).transpose(1, 2).flatten(1, 2)


def test_channels_that_cannot_be_followed_leave_the_others():
    torch.manual_seed(0)
    top = [nn.Conv2d(12, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    net = unsettled(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), Shuffle(12), Shuffle(12), *top))
    refused: dict[str, str] = {}
    groups = discover(net, IMAGES, refused=refused)
    assert [(group.name, group.size) for group in groups] == [("0", 8), ("5", 16)]
    assert "cannot be followed" in refused["2"]


def test_nothing_to_remove_is_said():
    with pytest.raises(UsageError, match="nothing in Sequential can be removed"):
        discover(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), IMAGES)


def small_densenet():
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(3, 4), num_init_features=16, num_classes=10)


NETS = {
    "resnet18": 3_055_880,
    "mobilenet_v3_small": 911_224,
    "efficientnet_b0": 1_701_446,
    "small_densenet": None,
    "squeezenet1_1": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_masked_is_removed_in_known_networks(name):
    import torchvision

    torch.manual_seed(0)
    make = getattr(torchvision.models, name, small_densenet)
    net = unsettled(make()).eval()
    x = torch.randn(2, 3, 40, 40)
    groups = discover(net, x)
    removed = removed_units(groups, 0.5)
    masked, small = masked_and_small(net, groups, removed)
    assert (masked(x) - small(x)).abs().max() <= 1e-5 * masked(x).abs().max()
    if NETS[name] is not None:
        assert sum(parameter.numel() for parameter in small.parameters()) == NETS[name]
    small(x).sum().backward()
    recipe = compile_recipe(net, groups, removed)
    if name == "resnet18":
        assert len(recipe.to_json()) < 10_000
    again = make()
    PruningRecipe.from_json(recipe.to_json()).apply(again)
    again.load_state_dict(small.state_dict())
    assert torch.equal(again.eval()(x), small(x))


def test_the_names_of_torch_pruning_in_use_are_there():
    import torch_pruning

    graph = torch_pruning.DependencyGraph().build_dependency(Residual(), IMAGES, forward_fn=None, verbose=False)
    layer = next(layer for layer in graph.module2node if isinstance(layer, nn.Conv2d))
    pruner = graph.get_pruner_of_module(layer)
    group = graph.get_pruning_group(layer, pruner.prune_out_channels, idxs=[0])
    assert {"idxs", "root_idxs", "dep"} <= set(vars(group.items[0])) | set(dir(group.items[0]))
    assert group.items[0].dep.target.module is layer
    assert graph.is_out_channel_pruning_fn(group.items[0].dep.handler)
    assert list(graph.unwrapped_parameters) == []


def test_a_weight_that_is_computed_stays_whole():
    from torch.nn.utils.parametrizations import weight_norm

    net = nn.Sequential(weight_norm(nn.Conv2d(1, 8, 3)), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert [group.name for group in discover(net, torch.rand(2, 1, 8, 8))] == ["2"]
