"""The fast path: the same function, nothing left behind, what cannot be used."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.attacks import FGSM, PGD
from robustdist.core import fast_path as module_under_test
from robustdist.core.fast_path import FastPath
from robustdist.core.trial import FastPathSettings
from robustdist.errors import UsageError
from tests.unit.core.fast_path_support import EVERYTHING, Net, X, Y, make_net, prepared


@pytest.fixture
def net():
    return make_net()


def gradient(net, x=X):
    x = x.clone().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        logits = net(x)
    return logits.detach(), torch.autograd.grad(F.cross_entropy(logits.float(), Y[: len(x)]), x)[0]


def snapshot(net):
    """Everything that must come back: objects, values, layouts, flags, modes, hooks, attributes."""
    return {
        "tensors": [(name, id(t), t.clone(), t.stride(), t.requires_grad, t.grad) for name, t in tensors(net)],
        "parts": [
            (id(part), part.training, sorted(vars(part)), len(part._forward_hooks), len(part._forward_pre_hooks))
            for part in net.modules()
        ],
        "rng": torch.get_rng_state(),
    }


def tensors(net):
    return [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]


def assert_same(before, after):
    assert before["parts"] == after["parts"]
    assert torch.equal(before["rng"], after["rng"])
    for (name, *old), (_, *new) in zip(before["tensors"], after["tensors"], strict=True):
        assert old[0] == new[0], name
        assert torch.equal(old[1], new[1]), name
        assert old[2:4] == new[2:4], name
        assert old[4] is new[4], name


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("fold_batch_norm", [False, True])
def test_logits_and_input_gradients_are_the_same(net, channels_last, fold_batch_norm):
    fast_path = prepared(net, channels_last=channels_last, fold_batch_norm=fold_batch_norm)
    net.eval()
    expected, expected_grad = gradient(net)
    with fast_path.applied(net):
        logits, grad = gradient(net)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(grad, expected_grad, rtol=1e-3, atol=1e-6)
    assert (fast_path.num_folded, fast_path.num_norms) == ((1, 3) if fold_batch_norm else (0, 0))


def test_what_stands_in_and_what_does_not(net):
    fast_path = prepared(net, **EVERYTHING)
    net.eval()
    with fast_path.applied(net):
        assert torch.is_autocast_enabled("cpu")
        for conv in (net.conv1, net.conv2):
            assert conv.weight.dtype == torch.bfloat16
            assert conv.weight.is_contiguous(memory_format=torch.channels_last)
            assert not conv.weight.requires_grad
        assert net.conv3.weight.dtype == torch.float32  # 1x1: both orders at once, autocast keeps its own cast
        assert net.norm1(X) is X
        assert net.norm2.weight is None
        assert net.conv1.bias.dtype == torch.bfloat16
        assert "bias" not in vars(net.conv2)
        outputs = []
        net.conv1.register_forward_hook(lambda *args: outputs.append(args[2]))
        net(X)
        assert outputs[0].is_contiguous(memory_format=torch.channels_last)
    assert not torch.is_autocast_enabled("cpu")


def test_a_pair_with_a_new_hook_or_a_thawed_norm_is_left_alone(net):
    fast_path = prepared(net, fold_batch_norm=True)
    handle = net.norm1.register_forward_pre_hook(lambda *_: None)
    with fast_path.applied(net):
        assert "weight" not in vars(net.conv1)
    handle.remove()
    with fast_path.applied(net, "train"):  # the norms use the batch: nothing at all is replaced
        assert not any("forward" in vars(part) for part in net.modules())
    net.norm1.eval()
    with fast_path.applied(net, "train"):
        assert "weight" in vars(net.conv1)
        assert "forward" not in vars(net.norm2)


def test_the_weights_on_entry_count(net):
    fast_path = prepared(net, **EVERYTHING | {"precision": "inherit"})
    net.eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.3)
        net.norm1.running_mean.add_(0.4)
    expected = net(X)
    with fast_path.applied(net):
        assert torch.allclose(net(X), expected, rtol=1e-4, atol=1e-5)


def test_random_dropout_in_train_mode_with_frozen_norms(net):
    for norm in (net.norm1, net.norm2, net.norm3):
        norm.eval()
    fast_path = FastPath(fold_batch_norm=True)
    fast_path.prepare(net, X, mode="train")
    assert fast_path.num_folded == 1
    attack = PGD(eps=0.1, steps=2, model_mode="train")
    expected = attack(net, X, Y)
    with fast_path.applied(net, "train"):
        assert (attack(net, X, Y) - expected).abs().mean() < 1e-3


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "options", [EVERYTHING, {"fold_batch_norm": "auto", "channels_last": "auto", "precision": "auto"}]
)
def test_the_module_comes_back_exactly(net, options, fails):
    net.conv1.weight.requires_grad_(False)
    net.conv2.weight.grad = torch.ones_like(net.conv2.weight)
    net.norm3.eval()
    net.alias = net.conv1  # shared
    seen = []
    net.linear.register_forward_hook(lambda *_: seen.append(1))
    before = snapshot(net)
    fast_path = prepared(net, **options)
    assert_same(before, snapshot(net))
    fast_path.adopt(FastPathSettings(**EVERYTHING))
    with pytest.raises(RuntimeError) if fails else nullcontext(), fast_path.applied(net):
        # two channels for three: the first convolution raises
        PGD(steps=2)(net, X[:, :2] if fails else X, Y)
    assert_same(before, snapshot(net))


def test_weights_and_their_gradients_do_not_notice(net):
    """The objective's backward pass after an attack in the same step is that of a step without a fast path."""
    net.dropout.p = 0.0
    fast_path = prepared(net, **EVERYTHING)
    twin = copy.deepcopy(net)
    logits, twin_logits = net(X), twin(X)  # a graph made before, as TRADES does
    x_adv = FGSM()(twin, X, Y)
    with fast_path.applied(net):
        FGSM()(net, X, Y)
    for model, clean in ((net, logits), (twin, twin_logits)):
        model.eval()
        (F.cross_entropy(clean, Y) + F.cross_entropy(model(x_adv), Y)).backward()
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_a_wrong_fold_is_noticed_although_new_norms_are_the_identity(monkeypatch):
    net = Net()  # norms as they are made
    wrong = lambda conv, norm: (conv.weight, torch.zeros(8))  # noqa: E731
    monkeypatch.setattr(module_under_test, "folded_pair", wrong)
    fast_path = prepared(net, fold_batch_norm=True)
    assert (fast_path.chosen.fold_batch_norm, fast_path.num_folded) == (False, 0)
    assert "batch norm is not folded: logits of the first batch would change by" in str(fast_path)
    with fast_path.applied(net):
        assert "weight" not in vars(net.conv1)


@pytest.mark.parametrize("value", [True, "auto"])
def test_nets_without_batch_norm_fall_back(value):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    fast_path = prepared(plain, fold_batch_norm=value)
    assert fast_path.notes == ["batch norm is not folded: there is none that uses running statistics"]
    assert fast_path.chosen == FastPathSettings()
    assert fast_path.trials == []  # nothing to measure


class ShardedLinear(nn.Linear):
    pass


ShardedLinear.__name__ = "FullyShardedDataParallel"


@pytest.mark.parametrize("option", [{"channels_last": True}, {"fold_batch_norm": "auto"}, {"compile": True}])
def test_sharded_weights_are_refused(option):
    net = nn.Sequential(nn.Flatten(), ShardedLinear(192, 5))
    for call in (lambda f: f.prepare(net, X), lambda f: f._applied(f.chosen, net, "eval").__enter__()):
        fast_path = FastPath(**option)
        fast_path.adopt(FastPathSettings(**dict.fromkeys(option, True)))
        with pytest.raises(UsageError, match=r"sharded.*: set channels_last=False"):
            call(fast_path)
    # autocast alone needs no copies
    prepared(net, precision="bf16")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"precision": "fp16"}, "precision='fp16' is unknown: choose inherit, bf16, 32 or auto"),
        ({"channels_last": "yes"}, "channels_last='yes' is unknown: choose true, false or auto"),
        ({"fold_batch_norm": None}, "fold_batch_norm=None is unknown"),
        ({"compile": "auto"}, "compile='auto' is unknown"),
    ],
)
def test_unknown_options(option, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        FastPath(**option)


@pytest.mark.slow
def test_a_compiled_module_is_neither_folded_nor_compiled_again():
    net = make_net()
    net.compile()
    assert prepared(net, fold_batch_norm="auto").notes == ["batch norm is not folded: the module is compiled"]
    net = nn.Sequential(nn.Flatten(), torch.compile(nn.Linear(192, 5), backend="eager"))
    with pytest.raises(UsageError, match="compile=True but the module is compiled already: set compile=False"):
        prepared(net, compile=True)


def test_compiled_code_is_not_sent_to_other_processes(net):
    fast_path = FastPath(compile=True, fold_batch_norm=True)
    fast_path._compiled[net] = lambda: 0
    assert pickle.loads(pickle.dumps(fast_path))._compiled == {}
    assert copy.deepcopy(fast_path)._compiled == {}
    fast_path.close()
    assert fast_path._compiled == {}


def test_a_compilation_that_fails_is_refused_in_one_sentence(net, monkeypatch):
    def broken(function, **_):
        return lambda *_: torch.zeros(2).view(3)

    monkeypatch.setattr(torch, "compile", broken)
    before = snapshot(net)
    with pytest.raises(UsageError, match=r"^compile=True failed on this module \(shape .*\): set compile=False$"):
        prepared(net, compile=True)
    assert_same(before, snapshot(net))


COMPILED = """
import torch, torch.nn.functional as F
from torch._dynamo.utils import counters
from robustdist.attacks import PGD
from robustdist.core.fast_path import FastPath
from tests.unit.core.test_fast_path import X, Y, gradient, make_net

torch.set_num_threads(1)
net = make_net()
net.conv2.weight.requires_grad_(False)
flags = [p.requires_grad for p in net.parameters()]
fast_path = FastPath(compile=True, fold_batch_norm=True)
fast_path.prepare(net, X)
net.eval()
for rows in (6, 6, 3, 6, 2):
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    logits, grad = gradient(net, X[:rows])
    with fast_path.applied(net):
        assert not any(p.requires_grad for p in net.parameters())
        fast_logits, fast_grad = gradient(net, X[:rows])
        with torch.no_grad():
            net(X[:rows])
    assert torch.allclose(fast_logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.allclose(fast_grad, grad, rtol=1e-3, atol=1e-6)
    assert [p.requires_grad for p in net.parameters()] == flags
assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
print("fine")
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_once_for_all_weights_and_batches():
    """In a process of its own: the compiler's counters and caches are global."""
    result = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=390, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("fine")
