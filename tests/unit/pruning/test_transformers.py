import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from robustdist.errors import UsageError
from robustdist.pruning import PruningRecipe, compile_recipe, discover
from robustdist.pruning.attention import PassThrough
from robustdist.pruning.discovery import check_layers
from robustdist.pruning.transformers import droppable_layers, transformer_groups
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, draw, masked_and_removed, randomised

IDS = torch.randint(3, 20, (2, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of_hugging_face(config, model, **options):
    def build():
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **options}))

    return build


def vision_transformer(**options):
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(16, 4, 2, 4, 16, 24, num_classes=5, **options)


def with_stem():
    from torchvision.models.vision_transformer import ConvStemConfig

    return vision_transformer(conv_stem_configs=[ConvStemConfig(8, 3, 2), ConvStemConfig(12, 3, 2)])


def home_made(**options):
    return HomeMadeModel([Block(HomeMade(**options)) for _ in range(2)])


DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 32}
PICTURE = {"image_size": 16, "patch_size": 4}
#: name -> (model, input, heads and feed-forward groups). GPT-2 has weights the other way round, ALBERT one layer twice.
OWN = {
    "home-made": (home_made, IDS, 4),
    "home-made, fused": (lambda: home_made(fused=True), IDS, 4),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0), 2, enable_nested_tensor=False
        ),
        torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)),
        4,
    ),
    "torchvision ViT": (vision_transformer, IMAGES, 4),
    "torchvision ViT with a stem": (with_stem, IMAGES, 4),
}
HUGGING_FACE = {
    "BERT": (of_hugging_face("BertConfig", "BertForSequenceClassification"), IDS, 4),
    "BERT, tied": (of_hugging_face("BertConfig", "BertForMaskedLM"), IDS, 4),
    "RoBERTa": (of_hugging_face("RobertaConfig", "RobertaForSequenceClassification"), IDS, 4),
    "DistilBERT": (of_hugging_face("DistilBertConfig", "DistilBertForSequenceClassification", **DISTIL), IDS, 4),
    "ViT": (of_hugging_face("ViTConfig", "ViTForImageClassification", **PICTURE), IMAGES, 4),
    "LLaMA": (of_hugging_face("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2), IDS, 4),
    "LLaMA, tied": (
        of_hugging_face("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=True),
        IDS,
        4,
    ),
    "LLaMA, one key": (of_hugging_face("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1), IDS, 4),
    "GPT-2": (of_hugging_face("GPT2Config", "GPT2LMHeadModel", **GPT2), IDS, 4),
    "ALBERT": (of_hugging_face("AlbertConfig", "AlbertForSequenceClassification", embedding_size=8), IDS, 2),
}
FAMILY = [
    *(pytest.param(*case, id=name) for name, case in OWN.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in HUGGING_FACE.items()),
]


def outputs(module, x):
    output = module(x)
    return output if isinstance(output, torch.Tensor) else output[0]


def check_equal(masked, small, dense, x):
    with torch.no_grad():
        expected, found, before = (outputs(module, x) for module in (masked, small, dense))
    assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()
    assert (before - found).abs().max() > 1e-3 * before.abs().max()


@pytest.mark.parametrize(("build", "x", "count"), FAMILY)
def test_masked_is_removed(build, x, count):
    torch.manual_seed(0)
    model = randomised(build())
    groups = transformer_groups(model)
    assert [group.kind for group in groups] == ["heads"] * (count // 2) + ["ffn"] * (count // 2)
    removed = draw(groups, 0.5)
    assert all(removed.values())
    masked, small = masked_and_removed(model, groups, removed)
    check_equal(masked, small, model, x)
    # a second look finds what is left of the same layers, and it can be trained
    again = transformer_groups(small)
    assert [group.name for group in again] == [group.name for group in groups]
    for group, before in zip(again, groups, strict=True):
        kept = [int(keep.sum()) for member, keep in before.kept(removed[group.name]) if member.role == "consumer"]
        assert [len(member.units) for member in group.consumers] == kept
    outputs(small, x).square().mean().backward()
    touched = {member.tensor for group in groups for member in group.members}
    assert all(parameter.grad is not None for name, parameter in small.named_parameters() if name in touched)


@pytest.mark.parametrize(
    ("build", "x", "count"),
    [case for case in FAMILY if case.id != "TransformerEncoder"],  # its caller fixes the width
)
def test_masked_is_removed_for_the_width_of_the_stream(build, x, count):
    torch.manual_seed(0)
    model = randomised(build())
    (group,) = transformer_groups(model, kinds=["hidden"])
    removed = draw([group], 0.9)
    masked, small = masked_and_removed(model, [group], removed)
    check_equal(masked, small, model, x)
    # together with heads and feed-forward units
    groups = transformer_groups(model, kinds=["heads", "ffn", "hidden"])
    masked, small = masked_and_removed(model, groups, draw(groups, 0.5))
    check_equal(masked, small, model, x)
    outputs(small, x).square().mean().backward()


@pytest.mark.parametrize(("build", "x", "count"), [case for case in FAMILY if case.id != "ALBERT"])
def test_a_dropped_layer_leaves_the_others(build, x, count):
    torch.manual_seed(0)
    model = randomised(build())
    layers = droppable_layers(model)
    assert check_layers(model, layers, x) == layers
    dropped, groups = layers[-1], transformer_groups(model)
    removed = draw([group for group in groups if not group.name.startswith(dropped)], 0.5)
    recipe = compile_recipe(model, groups, removed, dropped_layers=[dropped])
    small = copy.deepcopy(model)
    recipe.apply(small)
    assert isinstance(small.get_submodule(dropped), PassThrough)
    assert list(small.state_dict()) == [name for name in model.state_dict() if not name.startswith(f"{dropped}.")]
    expected = copy.deepcopy(model)
    compile_recipe(model, groups, removed).apply(expected)
    expected.get_submodule(dropped).forward = lambda hidden, *args, **kwargs: hidden
    assert torch.equal(outputs(small, x), outputs(expected, x))
    # a fresh model, the recipe and a state are the small model
    fresh = randomised(build(), seed=1)
    PruningRecipe.from_dict(json.loads(json.dumps(recipe.to_dict()))).apply(fresh)
    fresh.load_state_dict(small.state_dict())
    assert torch.equal(outputs(copy.deepcopy(fresh), x), outputs(small, x))


def test_first_layers_that_the_model_asks_are_not_dropped():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24), 3, enable_nested_tensor=False)
    assert droppable_layers(encoder) == ["layers.1", "layers.2"]
    block = Block(HomeMade())
    assert droppable_layers(HomeMadeModel([block, block, Block(HomeMade())])) == ["blocks.2"]


class Pair(Block):
    def forward(self, x):
        return super().forward(x[0] if isinstance(x, tuple) else x), None


class Shortening(Block):
    def forward(self, x):
        return super().forward(x)[:, 1:]


@pytest.mark.parametrize("block", [Pair, Shortening])
def test_blocks_that_return_something_else_are_not_dropped(block):
    class Model(HomeMadeModel):
        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return x

    model = Model([block(HomeMade()) for _ in range(2)])
    assert check_layers(model, droppable_layers(model), IDS) == []


def test_the_width_has_its_readers_and_tables_of_positions():
    class Positions(HomeMadeModel):
        def __init__(self, blocks):
            super().__init__(blocks)
            self.register_buffer("positions", torch.randn(1, 7, 16))
            self.register_buffer("causal", torch.ones(16, dtype=torch.bool))  # as long as the stream is wide

        def forward(self, ids):
            return self.head(self.blocks[0](self.embedding(ids) + self.positions).mean(1))

    model = randomised(Positions([Block(HomeMade())]))
    (group,) = transformer_groups(model, kinds=["hidden"])
    readers = ["attention.q", "attention.k", "attention.v", "mlp.0"]
    names = [*(f"blocks.0.{name}.weight" for name in readers), "head.weight"]
    assert [(member.tensor, member.dim) for member in group.consumers] == [(name, 1) for name in names]
    assert {member.tensor for member in group.members if member.role == "norm"} == {
        f"blocks.0.norm{number}.{name}" for number in (1, 2) for name in ("weight", "bias")
    }
    check_equal(*masked_and_removed(model, [group], draw([group], 0.5)), model, IDS)


def test_a_reused_block_is_one_group():
    block = Block(HomeMade())
    model = randomised(HomeMadeModel([block, block]))
    groups = transformer_groups(model)
    assert [group.name for group in groups] == ["blocks.0.attention", "blocks.0.mlp.0"]
    check_equal(*masked_and_removed(model, groups, draw(groups, 0.5)), model, IDS)


def test_layers_that_share_a_tensor_are_one_group():
    model = HomeMadeModel([Block(HomeMade()), Block(HomeMade())])
    model.blocks[1].attention.q.weight = model.blocks[0].attention.q.weight
    randomised(model)
    groups = transformer_groups(model)
    assert [group.name for group in groups] == ["blocks.0.attention", "blocks.0.mlp.0", "blocks.1.mlp.0"]
    check_equal(*masked_and_removed(model, groups, {"blocks.0.attention": [1, 3]}), model, IDS)


def test_a_tensor_shared_with_something_else_is_refused():
    model = HomeMadeModel([Block(HomeMade())])
    model.other = nn.Linear(24, 16)
    model.other.weight = model.blocks[0].mlp[2].weight
    refused: dict[str, str] = {}
    assert [group.name for group in transformer_groups(model, refused=refused)] == ["blocks.0.attention"]
    assert refused == {"blocks.0.mlp.0": "it shares a tensor with other.weight"}


def test_frozen_layers_are_pruned_and_stay_frozen():
    model = randomised(home_made())
    model.requires_grad_(False)
    groups = transformer_groups(model)
    masked, small = masked_and_removed(model, groups, draw(groups, 0.5))
    check_equal(masked, small, model, IDS)
    assert not any(parameter.requires_grad for parameter in small.parameters())


def with_attributes(attention=None, **values):
    attention = attention or HomeMade(head_dim=4)
    for name in [name for name, value in vars(attention).items() if type(value) is int]:
        delattr(attention, name)
    for name, value in values.items():
        setattr(attention, name, value)
    return attention


def with_part(name, part):
    attention = HomeMade()
    setattr(attention, name, part)
    return attention


def fused_by_head():
    attention = HomeMade(fused=True)
    attention.query_key_value = attention._modules.pop("qkv")
    return attention


def reparametrised():
    attention = HomeMade()
    parametrizations.weight_norm(attention.k)
    return attention


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (with_attributes(), "number of heads cannot be told"),
        (with_attributes(count=4, length=4), "number of heads cannot be told"),
        (with_attributes(h=16), "number of heads cannot be told"),
        (with_attributes(num_heads=4, head_dim=8), "number of heads cannot be told"),
        (with_attributes(num_heads=3), "are not heads of 5"),
        (with_part("bias_table", nn.Parameter(torch.zeros(9, 4))), "bias_table seems to have something for each head"),
        (with_part("q_norm", nn.LayerNorm(24)), "q_norm.weight seems to have something for each head"),
        (with_part("other", nn.Linear(24, 3)), "no layer could be told to be its output"),
        (fused_by_head(), "whether its rows go by head"),
        (reparametrised(), "k is ParametrizedLinear, no plain nn.Linear"),
        (with_part("k", nn.Sequential(nn.Linear(16, 24), nn.Tanh())), "k is Sequential"),
    ],
)
def test_attention_that_cannot_be_told_is_refused_by_name(attention, reason):
    attention.o = attention._modules.pop("o")
    if "no layer" in reason:
        attention.second, attention.o = attention.o, nn.Identity()
    model = HomeMadeModel([Block(attention)])
    with pytest.raises(UsageError, match=rf"blocks.0.attention cannot be pruned: .*{reason}"):
        transformer_groups(model, kinds=["heads"])
    refused: dict[str, str] = {}
    assert not any(group.kind == "heads" for group in transformer_groups(model, refused=refused))
    assert reason in refused["blocks.0.attention"]


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16)), "1.weight acts between its layers"),
        (nn.Sequential(nn.Linear(16, 48), nn.GLU(), nn.Linear(24, 16)), "gate and values in one layer"),
    ],
)
def test_a_feed_forward_part_that_cannot_be_told_is_refused_by_name(mlp, reason):
    block = Block(HomeMade())
    block.mlp = mlp
    with pytest.raises(UsageError, match=rf"blocks.0.mlp.0 cannot be pruned: .*{reason}"):
        transformer_groups(HomeMadeModel([block]))


def test_a_width_that_is_not_understood_is_refused_by_name():
    model = home_made()
    model.norm = nn.BatchNorm1d(16)
    with pytest.raises(UsageError, match=r"hidden cannot be pruned: norm.weight of BatchNorm1d"):
        transformer_groups(model, kinds=["hidden"])
    with pytest.raises(UsageError, match=r"streams of widths \[16, 32\]"):
        transformer_groups(nn.ModuleList([home_made(), Block(HomeMade(width=32), width=32)]), kinds=["hidden"])


def test_other_networks_have_no_groups():
    assert transformer_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))) == []
    assert droppable_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    ("name", "channels"), [("torchvision ViT", 0), ("torchvision ViT with a stem", 2), ("home-made", 0)]
)
def test_both_sources_find_no_tensor_twice(name, channels, require):
    require("torch_pruning")
    build, x, count = OWN[name]
    torch.manual_seed(0)
    model = randomised(build())
    refused: dict[str, str] = {}
    groups = discover(model, x, refused=refused)
    kinds = [group.kind for group in groups]
    assert (kinds.count("channels"), len(kinds), refused) == (channels, channels + count, {})
    places = [(member.tensor, member.dim) for group in groups for member in group.members]
    assert len(places) == len(set(places)) or channels
    check_equal(*masked_and_removed(model, groups, draw(groups, 0.5)), model, x)


def test_heads_that_something_else_counts_are_left_out():
    class Wrong(HomeMade):
        def forward(self, x):
            return super().forward(x) * (24 / self.q.out_features)

    model = randomised(HomeMadeModel([Block(Wrong()), Block(HomeMade())]))
    refused: dict[str, str] = {}
    names = [group.name for group in discover(model, IDS, refused=refused)]
    assert names == ["blocks.1.attention", "blocks.0.mlp.0", "blocks.1.mlp.0"]
    assert refused == {"blocks.0.attention": "something else depends on its units"}


@pytest.mark.slow
def test_half_of_minilm_has_the_known_size(require):
    require("transformers")
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    with torch.device("meta"):
        model = BertModel(BertConfig(vocab_size=100, **sizes))
    groups = transformer_groups(model)
    count = sum(parameter.numel() for parameter in model.encoder.parameters())
    compile_recipe(model, groups, {group.name: range(0, group.size, 2) for group in groups}).apply(model)
    assert (count, sum(parameter.numel() for parameter in model.encoder.parameters())) == (10_646_784, 5_330_304)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision ViT", "BERT"])
def test_a_removed_model_can_be_exported(name):
    build, x, _ = {**OWN, **HUGGING_FACE}[name]
    torch.manual_seed(0)
    model = randomised(build())
    groups = transformer_groups(model)
    layers = droppable_layers(model)[1:]
    removed = draw([group for group in groups if not group.name.startswith(tuple(layers))], 0.5)
    compile_recipe(model, groups, removed, dropped_layers=layers).apply(model)
    exported = torch.export.export(model, (x,), strict=False).module()
    with torch.no_grad():
        torch.testing.assert_close(outputs(exported, x), outputs(model, x))
