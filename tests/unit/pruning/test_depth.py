"""Whole layers as units: gates, masks, scores, costs, and what is locked or refused."""

import copy
import json

import pytest
import torch
from torch import nn

from robustdist.core.guard import frozen_parameters
from robustdist.errors import UsageError
from robustdist.pruning import CostModel, Gates, LearnedMasks, PruningRecipe, Target, compile_recipe, discover, select
from robustdist.pruning.depth import layer_groups, skip_layers
from robustdist.pruning.export import export_module
from robustdist.pruning.importance import Magnitude, Taylor, named_tensors
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, draw, masked_and_removed, randomised
from tests.unit.pruning.test_transformers import FAMILY, HUGGING_FACE, IDS, OWN, outputs

KINDS = ("heads", "ffn", "layers")


def deep(count=4):
    return randomised(HomeMadeModel([Block(HomeMade()) for _ in range(count)]))


@pytest.mark.parametrize(("build", "x", "count"), [case for case in FAMILY if case.id != "ALBERT"])
def test_masked_is_removed_with_half_of_the_rest(build, x, count):
    torch.manual_seed(0)
    model = randomised(build()).double()
    x = x.double() if x.is_floating_point() else x
    groups = discover(model, x, kinds=KINDS)
    (stack,) = [group for group in groups if group.kind == "layers"]
    removed = draw([group for group in groups if group is not stack], 0.5) | {stack.name: [1]}
    masked, small = masked_and_removed(model, groups, removed)
    with torch.no_grad():
        expected, found, before = (outputs(module, x) for module in (masked, small, model))
    assert (expected - found).abs().max() <= 1e-12 * expected.abs().max()
    assert (before - found).abs().max() > 1e-3 * before.abs().max()
    # all that was in the layer is gone, and the gradients of the masked one are those of the small one
    assert not any(name.startswith(f"{stack.layers[1]}.") for name in small.state_dict())
    for module in (masked, small):
        outputs(module, x).square().mean().backward()
    of_masked = dict(masked.named_parameters())
    for name, parameter in small.named_parameters():
        if parameter.shape == of_masked[name].shape:
            torch.testing.assert_close(parameter.grad, of_masked[name].grad, rtol=1e-9, atol=1e-9)
    inside = [parameter.grad for name, parameter in of_masked.items() if name.startswith(f"{stack.layers[1]}.")]
    assert inside
    assert all(grad is None or not grad.any() for grad in inside)


def test_the_gate_is_a_multiplier_on_what_a_layer_adds():
    """Against the forward pass written out, with one multiplier per layer; at 1 nothing changes to the bit."""
    model, weight = deep(3).double(), torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).double()
    (group,) = layer_groups(model)
    g = torch.tensor([1.0, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    x = model.embedding(IDS)
    for block, value in zip(model.blocks, g, strict=True):
        x = x + value * (block(x) - x)
    (expected,) = torch.autograd.grad((model.head(x.mean(1)) * weight).sum(), g)
    plain = model(IDS)
    with Gates(model, [group]) as gates:
        assert torch.equal(model(IDS), plain)
        gates.set({"blocks": g})
        (model(IDS) * weight).sum().backward()
        found = gates.gradients()["blocks"]
        torch.testing.assert_close(found, expected)
        assert copy.deepcopy(model)(IDS).equal(model(IDS))  # copies share the gates
        with frozen_parameters(model):  # as an attack does
            x = model.embedding(IDS).detach().requires_grad_()
            for block in model.blocks:
                x = block(x)
            x.sum().backward()
        assert not gates.gradients()["blocks"].any()
    assert torch.equal(model(IDS), plain)
    # what criteria make of it: the mean square
    tensors, criterion, steps = named_tensors(model), Taylor(), [found, 3 * found]
    for gradient in steps:
        gate = torch.ones(3, dtype=torch.float64)
        gate.grad = gradient
        criterion.observe([group], {**tensors, "blocks": gate})
    torch.testing.assert_close(criterion.score(group, tensors), torch.stack(steps).square().mean(0))


@pytest.mark.parametrize("p", [1, 2])
def test_magnitude_of_layers(p):
    model = deep(3)
    (group,) = layer_groups(model)
    state = {name: tensor.double() for name, tensor in model.state_dict().items() if "bias" not in name}
    sums = [
        [(tensor.abs() ** p).sum() for name, tensor in state.items() if name.startswith(path)] for path in group.layers
    ]
    sums = torch.tensor(sums, dtype=torch.float64)
    expected = sums.mean(1) / sums.mean()
    torch.testing.assert_close(Magnitude(p=p).score(group, named_tensors(model)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_costs_recipes_and_further_pruning(seed):
    """Whatever goes: predicted is counted, JSON and undo are exact, twice is once."""
    model = deep(5)
    groups = discover(model, IDS, kinds=KINDS)
    cost = CostModel(model, groups, lambda: model(IDS[:1]))
    removed = draw(groups, 0.4, seed)
    recipe, small = compile_recipe(model, groups, removed), copy.deepcopy(model)
    log = recipe.apply(small)
    assert cost.of(removed) == CostModel(small, [], lambda: small(IDS[:1])).dense
    assert PruningRecipe.from_json(json.dumps(recipe.to_dict())).hash() == recipe.hash()
    assert len(recipe.dropped_layers) == 2
    assert not any(recipe.drops(name) for name in [*(cut.tensor for cut in recipe.cuts), *recipe.attributes])
    assert recipe.slice_like(f"{recipe.dropped_layers[0]}.mlp.0.bias", torch.ones(24)) is None
    expected = small(IDS)
    # a second pruning counts the layers that are left; both in one are the same
    further = discover(small, IDS, kinds=KINDS)
    (stack,) = [group for group in further if group.kind == "layers"]
    assert stack.layers == tuple(path for path in groups[-1].layers if path not in recipe.dropped_layers)
    later = compile_recipe(small, further, draw(further, 0.4, seed + 10))
    later.apply(small)
    both, fresh = recipe.compose(later), copy.deepcopy(model)
    both.apply(fresh)
    assert torch.equal(fresh(IDS), small(IDS))
    assert len(both.dropped_layers) == 3
    # what is left to do where the first is done
    again = copy.deepcopy(model)
    recipe.apply(again)
    both.after(recipe, again).apply(again)
    assert torch.equal(again(IDS), small(IDS))
    small = copy.deepcopy(model)
    log = recipe.apply(small)
    assert torch.equal(small(IDS), expected)
    log.undo()
    assert torch.equal(small(IDS), model(IDS))
    assert list(small.state_dict()) == list(model.state_dict())


def test_the_way_to_a_number_of_layers():
    groups = discover(deep(6), IDS, kinds=["layers"])
    scores, target = {"blocks": torch.tensor([5.0, 1, 4, 0, 3, 2])}, Target.parse({"layers": 2})
    gone = [select(groups, scores, target=target, progress=way).get("blocks", []) for way in (0, 0.3, 0.5, 1)]
    assert gone == [[], [3], [1, 3], [1, 3, 4, 5]]


@pytest.mark.parametrize("trial", [None, IDS])
def test_layers_that_have_to_stay_are_counted_and_locked(trial):
    class Counting(HomeMadeModel):
        def forward(self, ids):
            return super().forward(ids) * len(self.blocks[1].mlp)

    class Pooling(Block):
        def forward(self, x):
            return super().forward(x).mean(1, keepdim=True) if self.attention.h == 2 else super().forward(x)

    blocks = [Pooling(HomeMade(heads=heads)) for heads in (4, 4, 2, 4)]
    (group,) = discover(randomised(Counting(blocks)), trial, kinds=["layers"])
    assert group.layers == tuple(f"blocks.{number}" for number in range(4))
    assert group.locked == (frozenset() if trial is None else {1, 2})
    if trial is not None:
        with pytest.raises(UsageError, match="target layers=1 does not fit group blocks, which can have 2 to 4"):
            select([group], {"blocks": torch.zeros(4)}, target=Target.parse({"layers": 1}))


def test_layers_of_a_decoder_with_a_cache(require):
    require("transformers")
    model = HUGGING_FACE["LLaMA"][0]()
    (group,) = discover(model, IDS, kinds=["layers"])
    assert (group.size, group.locked) == (2, {0})


def test_models_without_such_layers_are_refused_by_name():
    class Pair(Block):
        def forward(self, x) -> tuple[torch.Tensor, None]:
            return super().forward(x[0] if isinstance(x, tuple) else x), None

    with pytest.raises(UsageError, match=r"Sequential has no layers that can go.*no list of such.*in place of layers"):
        discover(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), torch.ones(1, 1, 4, 4), kinds=["layers"])
    with pytest.raises(UsageError, match=r"HomeMadeModel has no layers.*blocks.0: it returns more than the stream"):
        discover(HomeMadeModel([Pair(HomeMade()) for _ in range(2)]), None, kinds=["layers"])


def test_learned_masks_of_layers_are_drawn_and_then_whole():
    model = deep(4)
    groups = discover(model, IDS, kinds=KINDS)
    masks = LearnedMasks(groups, Target.parse({"layers": 3, "heads": 2}), init=0.0)
    drawn = masks.sample(0)["blocks"]
    assert bool(((drawn > 0) & (drawn < 1)).any())
    removed = masks.removed()
    fixed = masks.values(removed)
    assert fixed["blocks"].tolist() == [float(unit not in removed["blocks"]) for unit in range(4)]
    assert len(removed["blocks"]) == 1
    assert 0.4 < fixed["blocks.0.attention"].max() < 0.6


def test_a_skipped_layer_of_another_precision():
    class Half(Block):
        def forward(self, x):
            return super().forward(x).bfloat16()

    model = randomised(HomeMadeModel([Block(HomeMade()), Half(HomeMade())]))
    expected = copy.deepcopy(model)
    expected.blocks = expected.blocks[:1]
    skip_layers(model, ["blocks.1"])
    assert torch.equal(model(IDS), expected(IDS))


@pytest.mark.slow
@pytest.mark.parametrize("make", ["home-made", "TransformerEncoder"])
def test_onnx_without_layers(tmp_path, require, make):
    require("onnxscript")
    require("onnxruntime")
    build, x, _ = OWN[make]
    model = build()
    groups = discover(model, x, kinds=KINDS)
    removed = draw([group for group in groups if not group.layers], 0.5)
    compile_recipe(model, groups, removed | {groups[-1].name: [1]}).apply(model)
    assert export_module(model.eval(), x, tmp_path / "net.onnx", format="onnx").difference < 1e-4
