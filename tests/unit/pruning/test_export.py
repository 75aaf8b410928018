"""Export: what is written gives what the module gives, for any batch size, or nothing is written."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from robustdist.core.testing import toy_images
from robustdist.errors import UsageError
from robustdist.pruning import compile_recipe, discover
from robustdist.pruning.export import export_module
from tests.bert import texts, tiny_bert
from tests.unit.pruning.nets import Residual, unsettled


def small_net() -> nn.Module:
    """A network with half of its channels gone."""
    net = unsettled(Residual(width=8))
    groups = discover(net, toy_images(2)[0])
    compile_recipe(net, groups, {group.name: list(range(0, group.size, 2)) for group in groups}).apply(net)
    return net


@pytest.mark.slow
def test_an_exported_program_of_a_small_network(tmp_path):
    net, x = small_net(), toy_images(7)[0]
    done = export_module(net, x[:2], tmp_path / "net.pt2", format="torch_export")
    assert net.training
    assert done.difference < 1e-6
    assert done.num_bytes == (tmp_path / "net.pt2").stat().st_size
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.allclose(loaded(x), net.eval()(x), atol=1e-6)
    assert loaded(x[:1]).shape == (1, 3)


@pytest.mark.slow
def test_onnx_of_a_small_network(tmp_path, require):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package)
    import onnxruntime

    net, x = small_net(), toy_images(7)[0]
    done = export_module(net, x[:2], tmp_path / "net.onnx", format="onnx")
    assert done.difference < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (name,) = [entry.name for entry in session.get_inputs()]
    (found,) = session.run(None, {name: x.numpy()})
    assert abs(found - net.eval()(x).detach().numpy()).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["onnx", "torch_export"])
def test_a_transformer_with_fewer_heads_takes_other_lengths_too(tmp_path, require, format_):
    require("transformers")
    require("onnxruntime")
    net = tiny_bert()
    groups = discover(net)
    compile_recipe(net, groups, {group.name: [0] for group in groups}).apply(net)
    batch = texts([6, 4])
    batch.pop("labels")
    done = export_module(net, batch, tmp_path / "net", format=format_)
    assert done.difference < 1e-5
    other = texts([9, 3, 5])
    other.pop("labels")
    expected = net.eval()(**other).logits
    if format_ == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "net", providers=["CPUExecutionProvider"])
        assert [entry.name for entry in session.get_inputs()] == ["input_ids", "attention_mask"]
        found = torch.from_numpy(session.run(None, {name: value.numpy() for name, value in other.items()})[0])
    else:
        found = torch.export.load(tmp_path / "net").module()(**other).logits
    assert (found - expected).abs().max() < 1e-4


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class OneBatchSize(nn.Module):
    def forward(self, x):
        return x.reshape(2, -1)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Noisy(), r"torch_export: outputs differ from those of Noisy by .*nothing was written"),
        (OneBatchSize(), "OneBatchSize cannot be exported for any batch size"),
        (Branching(), "Branching cannot be exported.*keep Python decisions about values out of forward"),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, net, message):
    with pytest.raises(UsageError, match=message):
        export_module(net, torch.ones(2, 4), tmp_path / "net.pt2", format="torch_export")
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="does not exist, create it"):
        export_module(nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "no" / "net", format="onnx")
    with pytest.raises(UsageError, match="two samples at least"):
        export_module(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "net", format="torch_export")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"robustdist\[export\]"):
        export_module(nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "net", format="onnx")
