"""Which function of a module gives the logits, and in which precision."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from robustdist.core.forward import (
    as_logits,
    bind_forward,
    guarded_logits,
    looks_like_probabilities,
    precision_context,
)
from robustdist.errors import UsageError

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


# --- bind_forward


def test_the_module_itself_is_the_default():
    net = Net()
    assert bind_forward(net, None, "batch") is net


def test_a_sub_module_is_named_by_its_path():
    net = Net()
    assert bind_forward(net, "head", None) is net.head
    assert bind_forward(net, "features.1", None) is net.features[1]


@pytest.mark.parametrize("path", ["heads", "head.weight", "features.9", "head.bias.data"])
def test_a_wrong_path_is_answered_with_the_parts_there_are(path):
    with pytest.raises(UsageError, match=r"forward='.*' is no sub-module of Net: it has features, head"):
        bind_forward(Net(), path, None)


def test_a_function_gets_module_input_and_batch():
    calls = []
    net, batch, x = Net(), object(), torch.rand(2, 4)
    bound = bind_forward(net, lambda *args: calls.append(args) or "out", batch)
    assert bound(x) == "out"
    assert calls == [(net, x, batch)]


# --- as_logits

LOGITS = torch.rand(2, 3)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        nn.Parameter(LOGITS),
        {"logits": LOGITS, "loss": torch.tensor(1.0)},
        OrderedDict(loss=None, logits=LOGITS),
        UserDict(logits=LOGITS),
        SimpleNamespace(logits=LOGITS),
    ],
    ids=["tensor", "parameter", "dict", "ordered", "user-dict", "object"],
)
def test_logits_are_found(output):
    assert torch.equal(as_logits(output), LOGITS)


def test_a_tensor_is_handed_through():
    assert as_logits(LOGITS) is LOGITS


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ((LOGITS, LOGITS), "tuple"),
        ({"output": LOGITS}, "dict"),
        ({"logits": None}, "dict"),
        (SimpleNamespace(logits="no"), "SimpleNamespace"),
        (None, "NoneType"),
        (1.0, "float"),
    ],
)
def test_what_holds_no_logits_is_refused(output, shown):
    with pytest.raises(UsageError, match=f"returned {shown}, not logits.*option forward"):
        as_logits(output)


# --- guarded_logits


def test_guarded_logits_are_those_of_eval_mode_and_leave_no_trace():
    net = Net().train()
    net.features[3].eval()
    x = torch.rand(6, 4, requires_grad=True)
    statistics = net.features[2].running_mean.clone()
    rng = torch.get_rng_state()
    logits = guarded_logits(net, net, x)
    assert not logits.requires_grad
    assert [net.training, net.features[2].training, net.features[3].training] == [True, True, False]
    assert torch.equal(net.features[2].running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), rng)
    with torch.no_grad():
        assert torch.equal(logits, net.eval()(x))


def test_guarded_logits_in_train_mode_see_the_modules_flags():
    net = Net().train()
    net.features[3].eval()
    x = torch.rand(6, 4)
    statistics = net.features[2].running_mean.clone()
    logits = guarded_logits(net, net, x, "train")
    assert torch.equal(net.features[2].running_mean, statistics)
    with torch.no_grad():
        assert torch.equal(logits, net(x))
        assert not torch.equal(logits, net.eval()(x))


def test_a_seed_decides_what_a_random_forward_draws():
    net = Net().train()  # dropout
    x = torch.rand(8, 4)
    first = guarded_logits(net, net, x, "train", seed=5)
    assert torch.equal(guarded_logits(net, net, x, "train", seed=5), first)
    assert not torch.equal(guarded_logits(net, net, x, "train", seed=6), first)


def test_guarded_logits_work_in_inference_mode():
    net = Net()
    with torch.inference_mode():
        logits = guarded_logits(net, net, torch.rand(2, 4))
    assert not logits.is_inference()


def test_a_failing_forward_leaves_the_module_as_it_was():
    net = Net().train()

    def fails(x: Tensor) -> Tensor:
        net(x)
        raise ArithmeticError("inside")

    statistics = net.features[2].running_mean.clone()
    with pytest.raises(ArithmeticError):
        guarded_logits(net, fails, torch.rand(3, 4))
    assert net.features[3].training
    assert torch.equal(net.features[2].running_mean, statistics)


# --- precision_context


def dtype_under(precision: str) -> torch.dtype:
    with precision_context(precision, CPU):
        return nn.functional.linear(torch.rand(2, 4), torch.rand(3, 4)).dtype


def test_precisions():
    assert [dtype_under(name) for name in ("inherit", "bf16", "32")] == [torch.float32, torch.bfloat16, torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [dtype_under(name) for name in ("inherit", "bf16", "32")]
    assert found == [torch.bfloat16, torch.bfloat16, torch.float32]


# --- looks_like_probabilities


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_classes", [2, 10, 100, 1000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_softmax_outputs_are_recognised(num_classes, scale, dtype):
    logits = scale * torch.randn(64, num_classes)
    assert looks_like_probabilities(logits.softmax(1).to(dtype))
    assert looks_like_probabilities(logits.to(dtype).softmax(1))
    assert not looks_like_probabilities(logits.to(dtype))
    assert not looks_like_probabilities(logits.log_softmax(1).to(dtype))


@pytest.mark.parametrize(
    "logits",
    [
        torch.full((2, 4), math.nan),
        torch.tensor([[0.5, 0.5], [0.5, 0.6]]),
        torch.tensor([[1.5, -0.5]]),
        torch.rand(4),
        torch.ones(4, 1),
        torch.rand(2, 3, 3).softmax(1),
        torch.empty(0, 3),
        torch.tensor([[3, 1], [0, 2]]),
    ],
    ids=["nan", "one-row", "negative", "vector", "one-class", "maps", "empty", "integers"],
)
def test_other_outputs_are_not(logits):
    assert not looks_like_probabilities(logits)


def test_one_hot_integers_are_probabilities_too():
    assert looks_like_probabilities(torch.tensor([[1, 0], [0, 1]]))
