"""A compiled part is found however it was compiled."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch._dynamo import compiled_autograd

from robustdist.core.compiled import check_double_backward, compiled_part
from robustdist.errors import UsageError


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return self(batch).sum()


def wrapped_part():
    module = Module()
    module.body = torch.compile(module.body, backend="eager")
    return module


def part_in_place():
    module = Module()
    module.body[0].compile(backend="eager")
    return module


def decorated():
    class Decorated(nn.Linear):
        @torch.compile(backend="eager")
        def forward(self, x):
            return super().forward(x)

    module = Module()
    module.head = Decorated(3, 2)
    return module


WAYS = {
    "the whole": (lambda: from_compiled(torch.compile(Module(), backend="eager")), ""),
    "the wrapper": (lambda: torch.compile(Module().body, backend="eager"), ""),
    "a part": (wrapped_part, "body"),
    "a part in place": (part_in_place, "body.0"),
    "a decorated part": (decorated, "head"),
}


@pytest.mark.parametrize(("make", "name"), WAYS.values(), ids=WAYS)
def test_a_compiled_part_is_named_and_refused(make, name):
    module = make()
    assert compiled_part(module) == name
    with pytest.raises(UsageError) as caught:
        check_double_backward(module, "objective=FastBAT")
    message = str(caught.value)
    assert message.startswith("objective=FastBAT differentiates twice, but ")
    assert (repr(name) if name else "the module is compiled") in message
    assert "leave the module uncompiled" in message
    assert "\n" not in message


def test_an_ordinary_module_passes():
    assert compiled_part(Module()) is None
    check_double_backward(Module(), "objective=FastBAT")


def test_compiled_autograd_is_refused_while_it_is_on():
    with compiled_autograd._enable(lambda graph: graph), pytest.raises(UsageError, match="compiled autograd is on"):
        check_double_backward(Module(), "objective=FastBAT")
    check_double_backward(Module(), "objective=FastBAT")


def test_what_is_refused_could_not_be_trained():
    # the reason for the check: the day this works, it can go
    net = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), backend="aot_eager")
    x = torch.rand(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.square().sum().backward()
