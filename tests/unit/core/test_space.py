"""Where attacks work: pixels as they are, and the output of an embedding layer of models that nobody changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD, TokenPGD
from robustdist.core.batch import BatchAdapter
from robustdist.core.space import Embeddings, Pixels
from robustdist.core.testing import TinyNet, toy_images
from robustdist.errors import UsageError
from tests.bert import CLS, SEP, TextClassifier, texts, tiny_bert

LENGTHS = [7, 3, 10]


@pytest.fixture(autouse=True)
def transformers_installed(require):
    require("transformers")


@pytest.fixture
def bert() -> nn.Module:
    return tiny_bert().eval()


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def logits_from_embeddings(model: nn.Module, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Hugging Face's own way in, which the space does not use."""
    return model(inputs_embeds=x, attention_mask=batch["attention_mask"]).logits


# --- pixels


def test_pixels_are_the_batch_as_it_was():
    net, (x, y) = TinyNet(), toy_images(4)
    view = Pixels().view(net, (x, y))
    assert view.x is x
    assert view.y is y
    assert view.mask is None
    assert torch.equal(view(x), net(x))
    with view.at(x + 1) as batch, view.captured(x + 1) as seen:
        assert torch.equal(batch[0], x + 1)
        assert torch.equal(batch[1], y)
    assert seen == []
    with view.captured(x) as seen:
        logits = net(x)
    assert seen[0] is logits


def test_what_a_step_writes_into_its_batch_stays_there():
    net, (x, y) = TinyNet(), toy_images(4)
    view = Pixels().view(net, (x, y))
    point = (x / 2).requires_grad_()
    values, classes = point.detach().clone(), y.clone()
    with view.at(point) as batch, view.captured(point) as seen:
        first = net(batch[0])
        logits = net(batch[0].mul_(3))
        batch[1].zero_()
    assert torch.equal(point, values)
    assert torch.equal(y, classes)
    assert [value is first for value in seen] == [True]
    (grad,) = torch.autograd.grad(logits.sum(), point)
    leaf = values.requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(net(leaf * 3).sum(), leaf)[0])


def test_pixels_take_the_options_of_the_callbacks():
    net, (x, y) = nn.ModuleDict({"net": TinyNet()}), toy_images(4)
    batch = {"a": x, "b": x + 1, "c": y}
    view = Pixels().view(net, batch, BatchAdapter("b", "c"), "net")
    assert view.x is batch["b"]
    assert view.rowwise
    assert torch.equal(view(x), net["net"](x))
    function = Pixels().view(net, batch, BatchAdapter("b", "c"), lambda module, x, batch: batch["a"] + x)
    assert torch.equal(function(x), 2 * x)
    assert not function.rowwise


# --- the view of a text


def test_the_clean_point_is_the_output_of_the_layer(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    words = bert.get_input_embeddings()
    assert torch.equal(view.x, words.weight[batch["input_ids"]])
    assert not view.x.requires_grad
    assert view.y is batch["labels"]
    assert torch.equal(view.mask, batch["attention_mask"].bool())
    assert not view.rowwise


def test_the_output_at_a_point_is_that_of_the_model_on_these_embeddings(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    point = view.x + 0.1 * torch.randn_like(view.x) * view.mask[..., None]
    output = view(point)
    torch.testing.assert_close(output.logits, logits_from_embeddings(bert, point, batch), rtol=0, atol=1e-5)
    clean = bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(view(view.x).logits, clean)  # bit for bit
    assert output.loss is None  # the targets were left out
    assert float((output.logits - clean).detach().abs().max()) > 0.01


def test_padding_is_untouched_even_by_an_attack_that_moves_it(bert):
    batch = texts(LENGTHS)
    # a model that reads its padding: the mask is there for the attack alone
    view = Embeddings().view(bert, batch, forward=lambda module, x, batch: module(batch["input_ids"]))
    point = view.x + 0.1 * torch.randn_like(view.x)
    expected = logits_from_embeddings(
        bert, torch.where(view.mask[..., None], point, view.x), {"attention_mask": torch.ones_like(batch["input_ids"])}
    )
    torch.testing.assert_close(view(point).logits, expected, rtol=0, atol=1e-5)


def test_frozen_ids_and_padding_ids_are_left_out_of_the_mask(bert):
    batch = texts(LENGTHS)
    ids = batch["input_ids"]
    mask = Embeddings(frozen_ids=[CLS, SEP]).view(bert, batch).mask
    assert torch.equal(mask, batch["attention_mask"].bool() & (ids != CLS) & (ids != SEP))
    without = {key: value for key, value in batch.items() if key != "attention_mask"}
    assert torch.equal(Embeddings(mask_key=None).view(bert, without).mask, ids != 0)
    bert.get_input_embeddings().padding_idx = None
    assert bool(Embeddings(mask_key=None).view(bert, without).mask.all())


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        ("auto", None),
        ("auto", "model"),
        ("model.bert.embeddings.word_embeddings", "model"),
        ("model.bert.embeddings", "model"),
        ("auto", lambda module, x, batch: module.model(batch["input_ids"], batch["attention_mask"])),
    ],
    ids=["module", "part", "named", "whole-embedding", "function"],
)
def test_layers_and_forwards_as_users_name_them(layer, forward):
    module, batch = TextClassifier().eval(), texts(LENGTHS)
    view = Embeddings(layer).view(module, batch, forward=forward)
    found = TokenPGD(eps=0.3, steps=2).run(module, view.x, view.y, forward=view)
    losses = [
        F.cross_entropy(getattr(view(x), "logits", view(x)), view.y, reduction="none") for x in (view.x, found.x_adv)
    ]
    assert bool((losses[1] > losses[0]).all())
    assert torch.equal(found.x_adv[~view.mask], view.x[~view.mask])
    assert hooks(module) == 0


def test_other_signatures_get_what_they_name():
    class Everything(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part
            self.seen: list[Any] = []

        def forward(self, **inputs):
            self.seen.append(sorted(inputs))
            return self.part(**inputs)

    class Whole(Everything):
        def forward(self, batch):
            self.seen.append(sorted(batch))
            return self.part(batch["input_ids"])

    batch = texts(LENGTHS)
    for kind, seen in ((Everything, ["attention_mask", "input_ids"]), (Whole, sorted(batch))):
        module = kind(tiny_bert())
        view = Embeddings().view(module, batch)
        view(view.x)
        assert module.seen == [seen]


def test_nested_and_positional_batches(bert):
    batch = texts(LENGTHS)
    nested = ({"ids": batch["input_ids"], "mask": batch["attention_mask"]}, batch["labels"])

    def forward(module: Any, x: Tensor, batch: Any) -> Any:
        return module(batch[0]["ids"], batch[0]["mask"])

    space = Embeddings(ids_key="0.ids", mask_key="0.mask")
    view = space.view(bert, nested, BatchAdapter(target_key=1), forward)
    assert view.y is batch["labels"]
    assert torch.equal(view(view.x).logits, bert(batch["input_ids"], batch["attention_mask"]).logits)
    plain = (batch["input_ids"], batch["labels"])
    view = Embeddings(ids_key=0, mask_key=None).view(bert, plain, None, lambda module, x, batch: module(batch[0]))
    assert view.y is batch["labels"]
    assert torch.equal(view.mask, batch["input_ids"] != 0)


# --- a step at a point


def test_a_step_works_at_the_point_and_trains_the_layer_too(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    delta = 0.1 * torch.randn_like(view.x) * view.mask[..., None]
    with view.at(view.x + delta) as given:
        assert given is batch
        loss = bert(**given).loss
    loss.backward()
    words = bert.get_input_embeddings().weight
    grad, words.grad = words.grad.clone(), None
    # the same by hand: embed, add a constant, go on
    F.cross_entropy(logits_from_embeddings(bert, words[batch["input_ids"]] + delta, batch), batch["labels"]).backward()
    expected = words.grad.clone()
    expected[0] = 0.0  # torch gives the padding token no gradient, and the lookup by hand does not know which it is
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    assert float(grad.abs().max()) > 0


def test_gradients_reach_the_point(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    point = view.x.clone().requires_grad_()
    with view.at(point) as given:
        loss = bert(**given).loss
    (grad,) = torch.autograd.grad(loss, point)
    leaf = view.x.clone().requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(logits_from_embeddings(bert, leaf, batch), batch["labels"]), leaf)[0]
    torch.testing.assert_close(grad, expected * view.mask[..., None], rtol=1e-4, atol=1e-7)
    assert bool((grad[~view.mask] == 0).all())


def test_the_logits_of_a_step_are_captured(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    with view.captured(view.x) as seen:
        bert(**batch)  # not at the point
        with view.at(view.x) as given, torch.no_grad():
            bert(**given)  # no graph
        with view.at(view.x) as given:
            output = bert(**given)
        bert(**batch)
    assert len(seen) == 1
    assert seen[0] is output.logits
    function = Embeddings().view(bert, batch, forward=lambda module, x, batch: module(batch["input_ids"]))
    with function.captured(view.x) as seen, function.at(view.x):
        bert(**batch)
    assert seen == []
    assert hooks(bert) == 0


def test_calls_on_other_tokens_are_left_alone(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    words = bert.get_input_embeddings()
    others = batch["input_ids"].flip(0), batch["input_ids"][:, :4]
    with view.at(view.x + 1):
        assert all(torch.equal(words(ids), words.weight[ids]) for ids in others)
        moved = words(batch["input_ids"].clone())  # equal, not identical
        by_name = words(input=batch["input_ids"])
    assert torch.equal(moved, view.x + view.mask[..., None])
    assert torch.equal(moved, by_name)


# --- what is left behind


def test_the_module_is_as_it_was_after_an_attack_and_after_an_error():
    module, batch = TextClassifier(dropout=0.5), texts(LENGTHS)
    module.model.bert.encoder.layer[0].eval()  # frozen by the user
    modes = [part.training for part in module.modules()]
    keys = list(module.state_dict())
    view = Embeddings().view(module, batch)
    first, second = (TokenPGD(steps=2).run(module, view.x, view.y, forward=view).x_adv for _ in range(2))
    assert torch.equal(first, second)  # dropout was off
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.raises(ArithmeticError), view.at(view.x):
        raise ArithmeticError
    with pytest.raises(ArithmeticError), view.captured(view.x):
        raise ArithmeticError
    assert hooks(module) == 0
    assert list(module.state_dict()) == keys


def test_the_clean_point_of_a_layer_with_dropout_is_that_of_eval_mode():
    module, batch = TextClassifier(dropout=0.5), texts(LENGTHS)
    space = Embeddings("model.bert.embeddings")
    state = torch.get_rng_state()
    x = space.view(module, batch).x
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in module.modules())
    assert torch.equal(x, module.eval().model.bert.embeddings(batch["input_ids"]))


def test_a_longer_padding_gives_the_same_perturbation(bert):
    deltas = []
    for padded in (10, 17):
        batch = texts(LENGTHS, padded)
        view = Embeddings().view(bert, batch)
        found = TokenPGD(eps=0.3).run(bert, view.x, view.y, forward=view)
        deltas.append((found.x_adv - view.x)[view.mask])
    torch.testing.assert_close(deltas[1], deltas[0], rtol=0, atol=1e-5)
    assert float(deltas[0].abs().max()) > 0.05


def test_batches_made_in_inference_mode_can_be_attacked(bert):
    with torch.inference_mode():
        batch = texts(LENGTHS)
        view = Embeddings().view(bert, batch)
        found = TokenPGD(eps=0.3).run(bert, view.x, view.y, forward=view)
    expected = Embeddings().view(bert, texts(LENGTHS))
    assert torch.equal(found.x_adv, TokenPGD(eps=0.3).run(bert, expected.x, expected.y, forward=expected).x_adv)


def test_batch_encodings_of_hugging_face_are_batches(bert):
    from transformers import BatchEncoding

    with torch.inference_mode():
        batch = BatchEncoding(texts(LENGTHS))
        view = Embeddings().view(bert, batch)
        found = TokenPGD(eps=0.3).run(bert, view.x, view.y, forward=view)
    assert not bool(found.no_gradient.any())


def test_half_precision_weights(bert):
    batch = texts(LENGTHS)
    module = bert.bfloat16()
    view = Embeddings().view(module, batch)
    attack = TokenPGD(eps=0.3)
    found = attack.run(module, view.x, view.y, forward=view)
    assert found.x_adv.dtype == torch.bfloat16
    assert float(attack.distance(found.x_adv, view.x, view.mask).max()) <= 0.3 + 1e-6
    assert view(found.x_adv).logits.dtype == torch.bfloat16


def test_a_plain_attack_works_in_this_space(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch)
    found = PGD(norm="linf", bounds=None, eps=0.05, steps=3).run(bert, view.x, view.y, forward=view)
    before, after = (F.cross_entropy(view(x).logits, view.y) for x in (view.x, found.x_adv))
    assert bool(after > before)


# --- what does not fit


@pytest.mark.parametrize(
    ("space", "change", "message"),
    [
        (Embeddings("words"), {}, "layer='words' is no sub-module of BertForSequenceClassification: it has bert"),
        (Embeddings("classifier"), {}, "layer='classifier' cannot embed the ids"),
        (Embeddings("bert.encoder.layer.0.intermediate.intermediate_act_fn"), {}, "layer='bert.*act_fn'"),
        (Embeddings(ids_key="ids"), {}, "ids_key='ids' is not in the batch"),
        (Embeddings(ids_key="labels"), {}, "ids_key='labels' is torch.int64 of shape"),
        (Embeddings(), {"input_ids": "words"}, "ids_key='input_ids' is str"),
        (Embeddings(), {"attention_mask": None}, "mask_key='attention_mask' is not a mask of shape"),
        (Embeddings(mask_key="labels"), {}, "mask_key='labels' is not a mask of shape"),
        (Embeddings(mask_key="mask"), {}, "mask_key='mask' is not in the batch"),
    ],
)
def test_what_does_not_fit_is_named(bert, space, change, message):
    with pytest.raises(UsageError, match=message):
        space.view(bert, {**texts(LENGTHS), **change})


def test_a_batch_without_targets_is_refused(bert):
    batch = texts(LENGTHS)
    del batch["labels"]
    with pytest.raises(UsageError, match="target_key"):
        Embeddings().view(bert, batch)


def test_auto_needs_exactly_one_embedding():
    with pytest.raises(
        UsageError, match=r"layer='auto' finds 0 input embeddings in TinyNet: name the layer to attack$"
    ):
        Embeddings().view(TinyNet(), texts(LENGTHS))
    plain = nn.ModuleDict({"words": nn.Embedding(4, 2)})
    with pytest.raises(UsageError, match=r"finds 0 input embeddings.*for example 'words'"):
        Embeddings().view(plain, texts(LENGTHS))
    two = nn.ModuleDict({"a": tiny_bert(), "b": tiny_bert()})
    with pytest.raises(UsageError, match=r"finds 2.*'a.bert.embeddings.word_embeddings', 'b.bert"):
        Embeddings().view(two, texts(LENGTHS))

    class Other(nn.Module):
        def get_input_embeddings(self):
            raise NotImplementedError

    mixed = nn.ModuleDict({"a": Other(), "b": tiny_bert()})
    assert Embeddings().view(mixed, texts(LENGTHS)).x.shape[2] == 16


def test_a_pass_that_does_not_read_the_tokens_is_an_error(bert):
    batch = texts(LENGTHS)
    view = Embeddings().view(bert, batch, forward=lambda module, x, batch: module(batch["input_ids"].flip(1)))
    with pytest.raises(UsageError, match="layer='auto' did not meet the ids of the batch"):
        TokenPGD().run(bert, view.x, view.y, forward=view)
    with pytest.raises(UsageError, match="nothing was attacked"), view.at(view.x):
        pass
    assert hooks(bert) == 0
