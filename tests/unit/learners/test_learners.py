"""Low-rank pairs beside linear layers, against the formula; what is trained, merged and refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.errors import UsageError
from robustdist.learners import Learners
from robustdist.learners.pair import paired_layers, unmerged
from tests.bert import texts, tiny_bert


class Block(nn.Module):
    """Attention without heads and an FFN, by names people use."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(6, 6)
        self.ffn = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(x + self.ffn(torch.tanh(self.attention(x))))


class Net(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.classifier = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)


def data(seed: int = 1, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 6, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (16,), generator=generator)


def moved(net: nn.Module, learners: Learners, steps: int = 5, lr: float = 0.5) -> None:
    """Train a little, so that the pairs are no longer zero."""
    x, y = data(dtype=next(net.parameters()).dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def trained(net: nn.Module) -> set[str]:
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


# --- how much is trained


def meta(make):
    with torch.device("meta"):
        return make()


def distilbert():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return DistilBertForSequenceClassification(DistilBertConfig(num_labels=2))


class MeanPooled(nn.Module):
    """The size of all-MiniLM-L6-v2 with a head of eight classes on the mean of its tokens."""

    def __init__(self):
        from transformers import BertConfig, BertModel

        super().__init__()
        size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        self.encoder = BertModel(BertConfig(**size), add_pooling_layer=False)
        self.classifier = nn.Linear(384, 8)


@pytest.mark.parametrize(
    ("make", "options", "priming", "count"),
    [
        # pre_classifier 590,592 and classifier 1,538 beside 5,308,416 in pairs
        (distilbert, {"rank": 64}, False, 5_900_546),
        # while priming also weight and bias of four matrices in six layers
        (distilbert, {"rank": 64}, True, 5_900_546 + 6 * 4 * (768 * 768 + 768)),
        (distilbert, {"method": "freeze_ffn"}, False, 590_592 + 1_538 + 6 * 4 * (768 * 768 + 768)),
        (MeanPooled, {"rank": 16}, False, 666_632),
        # LoRA on queries and values
        (
            MeanPooled,
            {"rank": 8, "alpha": 16, "targets": ["query", "value"]},
            False,
            6 * 2 * 2 * 384 * 8 + 3_080,
        ),
    ],
)
def test_trained_parameters_are_counted_to_the_last(require, make, options, priming, count):
    require("transformers")
    learners = Learners(**options)
    learners.attach(meta(make), priming=priming)
    assert sum(p.numel() for p in learners.trained().values()) == count
    if priming:
        learners.end_priming()
        assert sum(p.numel() for p in learners.trained().values()) == 5_900_546


def test_bitfit_trains_biases_and_head():
    net = Net()
    learners = Learners(method="bitfit")
    learners.attach(net)
    expected = {name for name in net.state_dict() if name.endswith("bias") or name.startswith("classifier")}
    assert trained(net) == expected
    assert paired_layers(net) == {}


def test_what_was_frozen_stays_frozen_and_flags_come_back():
    net = Net()
    frozen = {"blocks.0.attention.weight", "classifier.bias"}
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    before = trained(net)
    learners = Learners(rank=2)
    learners.attach(net, priming=True)
    now = trained(net)
    pairs = {f"blocks.{n}.{part}.learner.{m}" for n in "01" for part in ("attention", "ffn") for m in ("down", "up")}
    attention = {"blocks.0.attention.bias", "blocks.1.attention.weight", "blocks.1.attention.bias"}
    assert now == pairs | attention | {"classifier.weight"}
    net(data()[0]).sum().backward()
    learners.end_priming()
    assert trained(net) == pairs | {"classifier.weight"}
    # an optimiser would go on with a gradient that is left
    assert {name for name, parameter in net.named_parameters() if parameter.grad is not None} == trained(net)
    learners.merge()
    assert trained(net) == before


# --- the formula


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_forward_and_gradients_are_those_of_the_formula(alpha):
    """y = x W + b + s x P1 P2 written out with plain matrices; gradients by torch on that."""
    net = Net().double()
    learners = Learners(rank=2, alpha=alpha)
    learners.attach(net)
    scale = 1.0 if alpha is None else alpha / 2
    for parameter in learners.trained().values():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    x, y = data(dtype=torch.float64)
    loss = F.cross_entropy(net(x), y)
    loss.backward()

    leaves = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}

    def linear(name, x):
        w = leaves[f"{name}.weight"].T
        y = x @ w + leaves.get(f"{name}.bias", 0.0)
        if f"{name}.learner.down" in leaves:
            y = y + scale * (x @ leaves[f"{name}.learner.down"] @ leaves[f"{name}.learner.up"])
        return y

    h = x
    for n in range(2):
        inner = h + linear(f"blocks.{n}.ffn", torch.tanh(linear(f"blocks.{n}.attention", h)))
        h = F.layer_norm(inner, (6,), leaves[f"blocks.{n}.norm.weight"], leaves[f"blocks.{n}.norm.bias"])
    expected = F.cross_entropy(linear("classifier", h), y)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, leaves[name].grad, rtol=1e-10, atol=1e-12)
        else:
            assert parameter.grad is None


def test_it_starts_as_it_is_and_draws_leave_the_global_stream_alone():
    net, x = Net(), data()[0]
    before, state = net(x), torch.get_rng_state()
    Learners(rank=3).attach(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net(x), before)
    downs = [pair["down"] for pair in unmerged(net).values()]
    assert all(float(down.abs().max()) <= 6**-0.5 for down in downs)
    assert all(float(down.abs().max()) > 0.7 * 6**-0.5 for down in downs)
    assert not torch.equal(downs[0], downs[1])
    again = Net()
    Learners(rank=3).attach(again)
    assert all(torch.equal(a, b["down"]) for a, b in zip(downs, unmerged(again).values(), strict=True))


# --- merging


@pytest.mark.parametrize("alpha", [None, 8.0])
def test_merging_and_the_state_dict_give_the_same_plain_model(require, alpha):
    require("transformers")
    model, plain = tiny_bert(), tiny_bert()
    learners = Learners(rank=4, alpha=alpha)
    learners.attach(model)
    batch = texts([5, 9, 7])
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    logits = model(**batch).logits
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(saved) == list(start)
    changed = {name for name in start if not torch.equal(start[name], saved[name])}
    linear = {f"{name}.weight" for name in paired_layers(model)}
    assert changed == linear | {name for name in start if name.startswith(("classifier", "bert.pooler"))}
    plain.load_state_dict(saved)
    torch.testing.assert_close(plain(**batch).logits, logits, rtol=0, atol=1e-5)
    assert float((logits - tiny_bert()(**batch).logits).detach().abs().max()) > 0.1
    learners.merge()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: tuple(p.shape) for name, p in plain.named_parameters()
    }
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._state_dict_hooks for module in model.modules())
    model.load_state_dict(start)  # no hook of ours is left
    learners.merge()  # nothing to do


def test_state_puts_weights_and_pairs_back_to_the_bit_after_a_plain_load():
    net = Net()
    learners = Learners(rank=2)
    learners.attach(net)
    moved(net, learners)
    everything = {name: value.clone() for name, value in net.named_parameters()}
    state, plain = copy.deepcopy(learners.state_dict()), copy.deepcopy(net.state_dict())
    moved(net, learners)
    net.load_state_dict(plain)
    loaded = Net()
    loaded.load_state_dict(plain)
    x = data()[0]
    assert torch.equal(net(x), loaded(x))  # a loaded weight is whole: P2 starts again
    learners.load_state_dict(state)
    assert all(torch.equal(value, everything[name]) for name, value in net.named_parameters())


def test_a_copy_has_pairs_of_its_own():
    net = Net()
    learners = Learners(rank=2)
    learners.attach(net)
    moved(net, learners)
    copied, x = copy.deepcopy(net), data()[0]
    before, saved = copied(x), {name: value.clone() for name, value in copied.state_dict().items()}
    moved(net, learners)
    assert torch.equal(copied(x), before)
    assert all(torch.equal(value, saved[name]) for name, value in copied.state_dict().items())
    assert not torch.equal(net(x), before)


# --- wrong input


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 6)
        self.out = nn.Linear(6, 6)
        self.out.weight = self.embedding.weight
        self.head = nn.Linear(6, 2)


class WithAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(6, 2)
        self.linear1 = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)


@pytest.mark.parametrize(
    ("options", "make", "words"),
    [
        ({"rank": 0}, Net, "rank=0 must be a whole number of at least 1"),
        ({"rank": 2.0}, Net, "rank=2.0"),
        ({"alpha": 0}, Net, "alpha=0 must be above 0"),
        ({"method": "far"}, Net, "choose one of learners, bitfit, freeze_ffn"),
        ({"targets": "("}, Net, "targets='(' must be made of regular expressions"),
        ({"targets": "query"}, Net, "targets='query' matches no linear layer outside the head: there are blocks.N.att"),
        ({"head": "top"}, Net, "head='top' matches no layer"),
        ({"prime": "mixer"}, Net, "prime='mixer' matches no linear layer outside the head: there are blocks.N.attent"),
        ({"head": None}, nn.Module, "there are no linear layers (those made in configure_model come too late"),
        ({}, Tied, "targets: out shares its weight with another layer"),
        ({"prime": "linear1"}, WithAttention, "mix is an nn.MultiheadAttention"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_changed(options, make, words):
    module = make()
    with pytest.raises(UsageError) as caught:
        Learners(**{"rank": 2, **options}).attach(module, priming="prime" in options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert paired_layers(module) == {}
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_layers_beside_multihead_attention_can_be_named():
    net = WithAttention()
    Learners(rank=2, targets="linear1").attach(net)
    assert list(paired_layers(net)) == ["linear1"]


def test_computed_weights_are_refused():
    net = nn.Sequential()
    net.add_module("body", nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    net.add_module("head", nn.Linear(4, 2))
    with pytest.raises(UsageError, match="body has a weight that is computed from others"):
        Learners(rank=2).attach(net)


def test_a_state_of_other_pairs_is_refused():
    nets = Net(), Net()
    one, other = Learners(rank=2), Learners(rank=3)
    one.attach(nets[0])
    other.attach(nets[1])
    with pytest.raises(UsageError, match="do not fit the checkpoint, which has rank 3"):
        one.load_state_dict(other.state_dict())
