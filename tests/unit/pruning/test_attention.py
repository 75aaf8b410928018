import copy

import pytest
import torch
from torch import nn

from robustdist.errors import UsageError
from robustdist.pruning.attention import PassThrough, SlimMultiheadAttention, slim
from robustdist.pruning.recipe import compile_recipe
from robustdist.pruning.transformers import transformer_groups
from tests.unit.pruning.stacks import masked_and_removed, randomised

WIDTH, HEADS, BATCH, TARGET, SOURCE = 12, 3, 2, 4, 5
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TARGET)
#: name -> (constructor, call); "self" calls with one tensor three times, "cross" with a longer second sequence.
CASES = {
    "self": ({}, {}),
    "self, batch first": ({"batch_first": True}, {}),
    "weights of all heads": ({"batch_first": True}, {"average_attn_weights": False}),
    "no weights": ({"batch_first": True}, {"need_weights": False}),
    "no bias": ({"bias": False}, {"need_weights": False}),
    "causal hint": ({"batch_first": True}, {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True}),
    "causal hint and weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "causal hint and padding": ({}, {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": "float"}),
    "causal hint, padding, no weights": (
        {},
        {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": "float", "need_weights": False},
    ),
    "bool mask": ({"batch_first": True}, {"attn_mask": CAUSAL.isinf(), "need_weights": False}),
    "padding": ({"batch_first": True}, {"key_padding_mask": "bool", "need_weights": False}),
    "padding as float": ({}, {"key_padding_mask": "float"}),
    "both masks": ({}, {"attn_mask": CAUSAL.isinf(), "key_padding_mask": "bool"}),
    "a mask per head": ({"batch_first": True}, {"attn_mask": "per head", "need_weights": False}),
    "a mask per head and padding": ({}, {"attn_mask": "per head", "key_padding_mask": "float"}),
    "cross": ({"batch_first": True}, {"cross": True}),
    "cross, other widths": ({"kdim": 7, "vdim": 9}, {"cross": True, "need_weights": False}),
    "added key": ({"add_bias_kv": True}, {"cross": True, "key_padding_mask": "bool"}),
    "added key, causal": ({"add_bias_kv": True}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "zero key": ({"add_zero_attn": True, "batch_first": True}, {"attn_mask": "per head", "need_weights": False}),
    "one sample": ({"batch_first": True}, {"single": True}),
    "one sample, padding": ({}, {"single": True, "key_padding_mask": "bool", "need_weights": False}),
}


def attention_and_inputs(options, call):
    torch.manual_seed(0)
    attention = randomised(nn.MultiheadAttention(WIDTH, HEADS, **options))
    call = dict(call)
    length = SOURCE if call.pop("cross", False) else TARGET
    single = call.pop("single", False)
    query = torch.randn(BATCH, TARGET, WIDTH)
    inputs = [query] * 3
    if length == SOURCE:
        inputs = [query, torch.randn(BATCH, SOURCE, attention.kdim), torch.randn(BATCH, SOURCE, attention.vdim)]
    if call.get("key_padding_mask") is not None:
        padding = torch.zeros(BATCH, length, dtype=torch.bool)
        padding[1, -2:] = True
        padding = (
            torch.zeros(BATCH, length).masked_fill(padding, -3.0) if call["key_padding_mask"] == "float" else padding
        )
        call["key_padding_mask"] = padding[1] if single else padding
    if isinstance(call.get("attn_mask"), str):
        call["attn_mask"] = torch.randn(BATCH * HEADS, TARGET, length)
    if single:
        inputs = [inputs[0][0]] * 3
    elif not attention.batch_first:
        flipped = {id(x): x.transpose(0, 1) for x in inputs}
        inputs = [flipped[id(x)] for x in inputs]
    return attention, inputs, call


@pytest.mark.parametrize("name", CASES)
def test_slim_attention_computes_what_it_was(name):
    attention, inputs, call = attention_and_inputs(*CASES[name])
    slimmed = copy.deepcopy(attention)
    slim(slimmed)
    for grad in (True, False):  # without gradients the parent class has a fused path
        with torch.set_grad_enabled(grad):
            expected, found = attention(*inputs, **call), slimmed(*inputs, **call)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for module in (attention, slimmed):
        module(*inputs, **call)[0].square().sum().backward()
    for (parameter, mine), theirs in zip(slimmed.named_parameters(), attention.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5, msg=parameter)


@pytest.mark.parametrize("removed", [[1], [2, 0]])
@pytest.mark.parametrize("name", [name for name in CASES if "per head" not in name and name != "zero key"])
def test_removed_heads_are_masked_heads(name, removed):
    attention, inputs, call = attention_and_inputs(*CASES[name])
    groups = transformer_groups(attention, kinds=["heads"])
    masked, small = masked_and_removed(attention, groups, {"heads": removed})
    assert (small.num_heads, small.head_dim) == (HEADS - len(removed), WIDTH // HEADS)
    expected, found = masked(*inputs, **call)[0], small(*inputs, **call)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (attention(*inputs, **call)[0] - found).abs().max() > 0.01
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_slim_keeps_parameters_and_can_be_undone():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    names, before = list(attention.state_dict()), list(attention.parameters())
    undo = slim(attention)
    assert type(attention) is SlimMultiheadAttention
    assert slim(attention)() is None
    assert type(attention) is SlimMultiheadAttention  # the second undo has nothing to undo
    assert names == list(attention.state_dict())
    assert all(new is old for new, old in zip(attention.parameters(), before, strict=True))
    undo()
    assert (type(attention), attention._qkv_same_embed_dim) == (nn.MultiheadAttention, True)


def test_slim_refuses_other_classes():
    class Special(nn.MultiheadAttention):
        pass

    for module in (Special(WIDTH, HEADS), nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=type(module).__name__):
            slim(module)
    with pytest.raises(UsageError, match="the model cannot be pruned: Special may not compute"):
        transformer_groups(Special(WIDTH, HEADS))


def test_masks_for_heads_that_are_gone_are_refused():
    attention, inputs, call = attention_and_inputs(*CASES["a mask per head"])
    groups = transformer_groups(attention)
    compile_recipe(attention, groups, {"heads": [0]}).apply(attention)
    with pytest.raises(UsageError, match="2 heads are left"):
        attention(*inputs, **call)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_path_of_the_encoder_is_not_taken(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first, dropout=0.0)
    encoder = randomised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first))
    groups = transformer_groups(encoder)
    masked, small = masked_and_removed(encoder, groups, {"layers.1.self_attn": [0, 3], "layers.0.linear1": [1, 2, 7]})
    x = torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    with torch.no_grad():
        for options in ({}, {"src_key_padding_mask": padding}):
            inside = ~padding[..., None] if options else torch.tensor(True)  # nested tensors leave zeros at padding
            expected = masked.train()(x, **options).where(inside, 0)
            assert torch.allclose(small.eval()(x, **options).where(inside, 0), expected, atol=1e-5, rtol=1e-5)
    assert not small.use_nested_tensor
    assert encoder.use_nested_tensor is not norm_first


def test_a_pass_through_returns_its_input_and_answers_for_the_block():
    block = nn.Module()
    block.attention_type, block.weight = "full", nn.Parameter(torch.ones(2))
    block.eval()
    passing = copy.deepcopy(PassThrough(block))
    x = torch.randn(2, 3)
    assert passing(x, None, mask=None) is x
    assert passing(hidden_states=x, mask=None) is x
    assert (passing.attention_type, passing.training, passing.state_dict()) == ("full", False, {})
