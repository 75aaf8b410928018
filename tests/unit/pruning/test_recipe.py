import copy

import pytest
import torch
from torch import nn

from robustdist.errors import UsageError
from robustdist.pruning import PruningRecipe, compile_recipe, load_pruned, optimizers_follow
from tests.unit.pruning.nets import mlp, mlp_group

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return mlp()


@pytest.fixture
def recipe(net):
    return compile_recipe(net, [mlp_group()], {"0": [1, 4]}, provenance={"method": "by hand"})


def test_the_kept_rows_and_columns_stay_in_order(net, recipe):
    dense = copy.deepcopy(net)
    recipe.apply(net)
    assert torch.equal(net[0].weight, dense[0].weight[[0, 2, 3, 5]])
    assert torch.equal(net[0].bias, dense[0].bias[[0, 2, 3, 5]])
    assert torch.equal(net[2].weight, dense[2].weight[:, [0, 2, 3, 5]])
    assert torch.equal(net[2].bias, dense[2].bias)
    assert (net[0].out_features, net[2].in_features) == (4, 4)


def test_parameters_stay_the_same_objects(net, recipe):
    net[0].weight.requires_grad_(False)
    net(X).sum().backward()
    before, grad = list(net.parameters()), net[2].weight.grad.clone()
    recipe.apply(net)
    assert all(new is old for new, old in zip(net.parameters(), before, strict=True))
    assert [parameter.requires_grad for parameter in net.parameters()] == [False, True, True, True]
    assert torch.equal(net[2].weight.grad, grad[:, [0, 2, 3, 5]])


def test_undo_puts_everything_back(net, recipe):
    dense, text = copy.deepcopy(net.state_dict()), repr(net)
    recipe.apply(net).undo()
    assert repr(net) == text
    assert all(torch.equal(dense[name], value) for name, value in net.state_dict().items())


def test_a_failure_leaves_the_module_whole(net, recipe):
    dense, text = copy.deepcopy(net.state_dict()), repr(net)
    content = recipe.to_dict()
    content["attributes"]["7"] = {"in_features": 3}
    with pytest.raises(AttributeError):
        PruningRecipe.from_dict(content).apply(net)
    assert repr(net) == text
    assert all(torch.equal(dense[name], value) for name, value in net.state_dict().items())


def test_json_and_a_meta_module(net, recipe):
    again = PruningRecipe.from_json(recipe.to_json(indent=1))
    assert again == recipe
    assert again.hash() == recipe.hash()
    with torch.device("meta"):
        empty = mlp()
    again.apply(empty)
    recipe.apply(net)
    empty.load_state_dict(net.state_dict(), assign=True)
    assert torch.equal(empty(X), net(X))


def test_the_hash_is_about_what_is_done(net, recipe):
    other = compile_recipe(net, [mlp_group()], {"0": [1, 4]}, provenance={"method": "another"})
    assert other.hash() == recipe.hash()
    assert compile_recipe(net, [mlp_group()], {"0": [1, 3]}).hash() != recipe.hash()


def test_two_recipes_in_one(net, recipe):
    dense = copy.deepcopy(net)
    recipe.apply(net)
    later = compile_recipe(net, [mlp_group(4)], {"0": [0, 2]})  # dense units 0 and 3
    later.apply(net)
    recipe.compose(later).apply(dense)
    assert torch.equal(dense[0].weight, net[0].weight)
    assert torch.equal(dense(X), net(X))
    assert dense[0].out_features == 2


def test_the_rest_of_a_recipe_of_which_a_part_is_done(net, recipe):
    earlier = copy.deepcopy(net)
    recipe.apply(earlier)
    later = compile_recipe(earlier, [mlp_group(4)], {"0": [1]})
    rest = recipe.compose(later).after(recipe, earlier)
    assert rest.hash() == later.hash()
    rest.apply(earlier)


def test_a_tensor_with_two_names_is_cut_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.twin = nn.Linear(6, 3)
            self.twin.weight = self.net[2].weight

    model = Tied()
    group = mlp_group()
    members = tuple(type(m)(f"net.{m.tensor}", m.dim, m.units, m.role) for m in group.members)
    members += (type(members[0])("twin.weight", 1, torch.arange(6), "consumer"),)
    recipe = compile_recipe(model, [type(group)("net.0", "channels", 6, members)], {"net.0": [0]})
    recipe.apply(model)
    assert model.twin.weight is model.net[2].weight
    assert model.twin.weight.shape == (3, 5)
    assert model.twin.in_features == 5
    assert recipe.slice_like("twin.weight", torch.ones(3, 6)).shape == (3, 5)


def test_channels_last_stays():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    group = mlp_group(4)
    renamed = tuple(type(m)(m.tensor.replace("2.", "1."), m.dim, m.units, m.role) for m in group.members)
    compile_recipe(net, [type(group)("0", "channels", 4, renamed)], {"0": [2]}).apply(net)
    assert net[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert not net[1].weight.is_contiguous()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp(width=7), "made for Sequential with 51 parameters, this is Sequential with 59.*dimension"),
        (lambda: nn.Linear(4, 3), "it has no 0.bias"),
    ],
)
def test_another_architecture_is_refused(recipe, make, message):
    other = make()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(UsageError, match=message):
        recipe.apply(other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_no_group_loses_everything(net):
    with pytest.raises(UsageError, match="group 0: all 6 channels selected"):
        compile_recipe(net, [mlp_group()], {"0": range(6)})


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 9}', '{"version": 1}'])
def test_damaged_recipes_are_refused(text):
    with pytest.raises(UsageError, match="recipe"):
        PruningRecipe.from_json(text)


def test_state_of_other_shapes_starts_anew(net, recipe):
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    optimizer = torch.optim.Adam(net.parameters())
    net(X).square().sum().backward()
    optimizer.step()
    factored = optimizer.state[net[0].weight]
    factored["exp_avg_sq"] = factored["exp_avg_sq"].sum(1)  # as Adafactor keeps it
    recipe.apply(net)
    assert optimizers_follow([optimizer], net, recipe, shapes) == ["0.weight"]
    assert net[0].weight not in optimizer.state
    assert optimizer.state[net[2].weight]["exp_avg"].shape == (3, 4)
    assert optimizer.state[net[2].weight]["step"] == 1


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_masked(net, name):
    from robustdist.pruning import UnitMasks

    net.double()
    x, group = X.double(), mlp_group()
    recipe = compile_recipe(net, [group], {"0": [1, 4]})
    masks, dense_shapes = UnitMasks(net, recipe), {name: parameter.shape for name, parameter in net.named_parameters()}
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(net, optimizer, scheduler, masks=None):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        if masks is not None:
            masks.apply_to_gradients()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if masks is not None:
            masks.apply()

    for _ in range(3):
        step(net, optimizer, scheduler)
    masks.apply()
    masks.apply_to_moments([optimizer])
    small, small_optimizer, small_scheduler = copy.deepcopy((net, optimizer, scheduler))
    recipe.apply(small)
    assert optimizers_follow([small_optimizer], small, recipe, dense_shapes) == []
    for _ in range(10):
        step(net, optimizer, scheduler, masks)
        step(small, small_optimizer, small_scheduler)
    assert (net(x) - small(x)).abs().max() < 1e-12
    expected = recipe.slice_like("0.weight", net[0].weight.data)
    assert (small[0].weight - expected).abs().max() < 1e-12


@pytest.mark.parametrize("text", ["hello", "trainer:\n  max_epochs: 2\n", ""])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, text):
    (tmp_path / "some.ckpt").write_text(text)
    with pytest.raises(UsageError, match=r"some\.ckpt is no checkpoint"):
        load_pruned(nn.Linear, tmp_path / "some.ckpt")


def test_a_checkpoint_whose_writing_was_interrupted_is_named(tmp_path):
    torch.save({"state_dict": nn.Linear(50, 50).state_dict()}, tmp_path / "whole.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"cut\.ckpt is cut off"):
        load_pruned(nn.Linear, tmp_path / "cut.ckpt")
