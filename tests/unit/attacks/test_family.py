"""What every attack has to obey. A new attack is one more row in ``ROWS``."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import (
    APGD,
    FAB,
    FGSM,
    MIFGSM,
    PGD,
    Attack,
    AutoAttack,
    FriendlyPGD,
    NoiseFGSM,
    Square,
    TorchAttack,
)


@dataclass(frozen=True)
class Row:
    """One attack under test.

    ``norm`` and ``eps`` are stated here and not read from the attack: None for an attack without a radius.
    ``max_accuracy`` is what may be left of the accuracy of 1; None asks for a higher loss of every sample instead.
    ``forwards`` is the forward at which the model of the exception test raises, ``needs`` an optional package.
    """

    id: str
    make: Callable[..., Attack]
    norm: str = "linf"
    eps: float | None = 0.1
    targeted: bool = False
    random: bool = True
    max_accuracy: float | None = None
    forwards: int = 3
    needs: str | None = None


def torch_attack(name: str, **fixed: Any) -> Callable[..., Attack]:
    return lambda **kwargs: TorchAttack(name, **fixed, **kwargs)


PGD_SMALL = {"eps": 0.1, "steps": 4, "step_size": 0.03}
SEARCH = {"eps": None, "random": False, "needs": "torchattacks"}  # no radius: they look for the nearest wrong image

ROWS = [
    Row("FGSM", lambda **kwargs: FGSM(eps=0.1, **kwargs), random=False, forwards=1),
    Row("FGSM-RS", lambda **kwargs: FGSM(eps=0.1, step_size=0.06, random_start=True, **kwargs), forwards=1),
    Row("PGD-linf", lambda **kwargs: PGD(**PGD_SMALL, **kwargs)),
    Row("PGD-no-start", lambda **kwargs: PGD(**PGD_SMALL, random_start=False, **kwargs), random=False),
    Row("PGD-margin", lambda **kwargs: PGD(**PGD_SMALL, attack_loss="margin", **kwargs)),
    Row("PGD-restarts", lambda **kwargs: PGD(**PGD_SMALL, restarts=3, **kwargs)),
    Row("PGD-targeted", lambda **kwargs: PGD(**PGD_SMALL, targeted=True, **kwargs), targeted=True),
    Row("PGD-l2", lambda **kwargs: PGD(norm="l2", eps=1, steps=4, step_size=0.4, **kwargs), "l2", 1.0),
    Row("PGD-l1", lambda **kwargs: PGD(norm="l1", eps=8, steps=4, step_size=3, **kwargs), "l1", 8.0),
    Row("PGD-train-mode", lambda **kwargs: PGD(**PGD_SMALL, model_mode="train", **kwargs)),
    Row("FriendlyPGD", lambda **kwargs: FriendlyPGD(tau=1, noise_std=0.01, **PGD_SMALL, **kwargs), max_accuracy=0.7),
    # leaves the ball on purpose: two radii of noise, one of the step, and the rounding of half precision
    Row("NoiseFGSM", lambda **kwargs: NoiseFGSM(eps=0.1, **kwargs), eps=0.3 + 1e-3, max_accuracy=0.8, forwards=1),
    Row("MIFGSM", lambda **kwargs: MIFGSM(eps=0.1, steps=3, **kwargs), random=False),
    Row("APGD-ce", lambda **kwargs: APGD(eps=0.1, steps=6, drop=False, **kwargs)),
    Row("APGD-drop", lambda **kwargs: APGD(eps=0.1, steps=6, **kwargs), max_accuracy=0.2),
    Row("APGD-dlr", lambda **kwargs: APGD(eps=0.1, steps=10, attack_loss="dlr", **kwargs), max_accuracy=0.3),
    Row("APGD-t", lambda **kwargs: APGD(eps=0.1, steps=6, attack_loss="dlr_targeted", **kwargs), max_accuracy=0.2),
    Row("APGD-restarts", lambda **kwargs: APGD(eps=0.1, steps=4, restarts=2, drop=False, **kwargs)),
    Row("APGD-targeted", lambda **kwargs: APGD(eps=0.1, steps=6, targeted=True, **kwargs), targeted=True),
    Row("APGD-l2", lambda **kwargs: APGD(norm="l2", eps=1, steps=6, drop=False, **kwargs), "l2", 1.0),
    Row("FAB", lambda **kwargs: FAB(eps=0.15, steps=10, **kwargs), eps=0.15, random=False, max_accuracy=0.4),
    Row("FAB-l2", lambda **kwargs: FAB(norm="l2", eps=1.5, steps=10, **kwargs), "l2", 1.5, False, False, 0.4),
    Row("FAB-l1", lambda **kwargs: FAB(norm="l1", eps=15, steps=10, **kwargs), "l1", 15.0, False, False, 0.4),
    Row("FAB-nearest", lambda **kwargs: FAB(eps=0.15, steps=8, n_targets=None, **kwargs), "linf", 0.15, False, False),
    Row("Square", lambda **kwargs: Square(eps=0.25, queries=60, **kwargs), eps=0.25, max_accuracy=0.8),
    Row(
        "Square-ahead",
        lambda **kwargs: Square(eps=0.25, queries=60, look_ahead=True, **kwargs),
        eps=0.25,
        max_accuracy=0.8,
    ),
    Row("Square-l2", lambda **kwargs: Square(norm="l2", eps=2.5, queries=60, **kwargs), "l2", 2.5, max_accuracy=0.9),
    Row(
        "AutoAttack-l2",
        lambda **kwargs: AutoAttack(norm="l2", eps=1, steps=6, queries=20, **kwargs),
        "l2",
        1.0,
        max_accuracy=0.4,
    ),
    Row("AutoAttack", lambda **kwargs: AutoAttack(eps=0.1, steps=4, queries=20, **kwargs), max_accuracy=0.2),
    Row(
        "AutoAttack-bf16",
        lambda **kwargs: AutoAttack(
            eps=0.1, steps=4, queries=20, precision="bf16", channels_last=True, batch_size=3, **kwargs
        ),
        max_accuracy=0.2,
    ),
    Row("TorchAttack-PGD", torch_attack("PGD", eps=0.1, alpha=0.03, steps=4), needs="torchattacks"),
    Row("TorchAttack-APGDT", torch_attack("APGDT", eps=0.1, steps=5), max_accuracy=0.5, needs="torchattacks"),
    Row("TorchAttack-CW", torch_attack("CW", c=5, lr=0.05, steps=20), **SEARCH, max_accuracy=0.5),
    Row("TorchAttack-FAB", torch_attack("FAB", eps=0.1, steps=5), random=False, max_accuracy=0.8, needs="torchattacks"),
    Row(
        "TorchAttack-Square",
        torch_attack("Square", eps=0.25, n_queries=60),
        eps=0.25,
        max_accuracy=0.8,
        needs="torchattacks",
    ),
    Row("TorchAttack-DeepFool", torch_attack("DeepFool", steps=20), **SEARCH, max_accuracy=0.8),
    Row("TorchAttack-JSMA", torch_attack("JSMA", gamma=0.15), **SEARCH, max_accuracy=0.5),
]


@pytest.fixture(params=ROWS, ids=lambda row: row.id)
def row(request, require) -> Row:
    if request.param.needs is not None:
        require(request.param.needs)
    return request.param


def labels_for(row: Row, y: Tensor) -> Tensor:
    """The classes to leave, or those to reach."""
    return (y + 1) % 5 if row.targeted else y


def few(task) -> tuple[nn.Module, Tensor, Tensor]:
    """One sample per class, where ten would only cost time."""
    return task.net, task.x[:5], task.y[:5]


def lengths(delta: Tensor, norm: str) -> Tensor:
    """Length per sample, in double precision and without the code under test."""
    flat = delta.double().flatten(1)
    return {"linf": flat.abs().amax(1), "l2": flat.square().sum(1).sqrt(), "l1": flat.abs().sum(1)}[norm]


def rng_states() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest]


class Snapshot:
    """Everything about a module and the process that an attack could change."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modes = {name: child.training for name, child in module.named_modules()}
        self.buffers = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
        self.parameters = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
        self.requires_grad = {name: p.requires_grad for name, p in module.named_parameters()}
        self.grads = {
            name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in module.named_parameters()
        }
        self.rng = rng_states()
        self.context = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def check(self) -> None:
        module = self.module
        assert {name: child.training for name, child in module.named_modules()} == self.modes
        buffers = dict(module.named_buffers())
        assert buffers.keys() == self.buffers.keys()
        for name, (buffer, values) in self.buffers.items():
            assert buffers[name] is buffer, name
            assert torch.equal(buffer, values), name
        parameters = dict(module.named_parameters())
        assert parameters.keys() == self.parameters.keys()
        for name, (parameter, values) in self.parameters.items():
            assert parameters[name] is parameter, name
            assert torch.equal(parameter, values), name
            assert parameter.requires_grad == self.requires_grad[name], name
            grad, grad_values = self.grads[name]
            assert parameter.grad is grad, name
            assert grad is None or torch.equal(grad, grad_values), name
        assert rng_states() == self.rng
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == self.context


def prepare(net: nn.Module, *, grads: bool) -> None:
    """Put ``net`` into a state that a careless attack destroys."""
    net.train()
    net.norm2.eval()  # frozen by the user
    net.conv1.weight.requires_grad_(False)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if grads else None
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


class Shifted(nn.Module):
    """Takes a constant off its input, in the input itself or in a copy."""

    def __init__(self, net: nn.Module, *, writes: bool) -> None:
        super().__init__()
        self.net, self.writes = net, writes

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.sub_(0.25) if self.writes else x - 0.25)


def test_a_forward_may_write_into_its_input(row, task):
    net, x, y = few(task)
    adversarial = [row.make()(Shifted(net, writes=writes), x, labels_for(row, y)) for writes in (True, False)]
    assert torch.equal(*adversarial)


def test_stays_in_ball_and_box(row, task):
    net, x, y = task
    before = x.clone()
    x_adv = row.make()(net, x, labels_for(row, y))
    assert torch.equal(x, before)
    assert x_adv.shape == x.shape
    assert not x_adv.requires_grad
    assert x_adv.data_ptr() != x.data_ptr()
    assert float(x_adv.min()) >= 0.0
    assert float(x_adv.max()) <= 1.0
    assert float(lengths(x_adv - x, row.norm).max()) > 0.01
    if row.eps is not None:
        assert float(lengths(x_adv.double() - x.double(), row.norm).max()) <= row.eps + 1e-6


def test_hurts_the_model(row, task):
    net, x, y = task
    target = labels_for(row, y)
    result = row.make().run(net, x, target)
    assert result.no_gradient.shape == (len(x),)
    assert not bool(result.no_gradient.any())
    with torch.no_grad():
        before, after = net(x), net(result.x_adv)
    losses = [F.cross_entropy(logits, target, reduction="none") for logits in (before, after)]
    if row.targeted:
        losses.reverse()
    if row.max_accuracy is None:
        assert bool((losses[1] > losses[0]).all())
    else:
        assert float((after.argmax(1) == y).float().mean()) <= row.max_accuracy
    assert float(losses[1].mean()) > 2 * float(losses[0].mean())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_keeps_dtype_and_memory_format(row, task, dtype, memory_format):
    net, x, y = task
    x = x[:4].to(dtype=dtype, memory_format=memory_format)
    result = row.make().run(net.to(dtype=dtype, memory_format=memory_format), x, labels_for(row, y[:4]))
    x_adv = result.x_adv
    assert (x_adv.dtype, x_adv.device, x_adv.stride()) == (x.dtype, x.device, x.stride())
    assert x_adv.is_contiguous(memory_format=memory_format)
    assert not torch.equal(x_adv, x)
    if row.norm == "linf" and row.eps is not None:
        assert float((x_adv.double() - x.double()).abs().max()) <= row.eps + (0 if x.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("grads", [False, True], ids=["no-grads", "grads"])
def test_leaves_everything_as_it_was(row, task, grads):
    net, x, y = few(task)
    prepare(net, grads=grads)
    target = labels_for(row, y)
    before = x.clone(), target.clone()
    snapshot = Snapshot(net)
    x_adv = row.make()(net, x, target)
    snapshot.check()
    assert not torch.equal(x_adv, x)
    assert torch.equal(x, before[0])
    assert torch.equal(target, before[1])
    assert x.grad is None
    assert not x.requires_grad


@pytest.mark.parametrize("grads", [False, True], ids=["no-grads", "grads"])
def test_leaves_everything_as_it_was_when_the_model_raises(row, task, grads):
    net, x, y = few(task)
    prepare(net, grads=grads)
    net.fail_at = row.forwards
    snapshot = Snapshot(net)
    with pytest.raises(ArithmeticError, match="on purpose"):
        row.make()(net, x, labels_for(row, y))
    snapshot.check()
    assert net.num_forwards == row.forwards


def test_randomness_follows_seed_rank_and_step_alone(row, task):
    net, x, y = few(task)
    target = labels_for(row, y)

    def attack(global_seed: int = 0, seed: int = 3, **key: int) -> Tensor:
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)
        return row.make(seed=seed)(net, x, target, **key)

    base = attack(rank=1, step=2)
    assert torch.equal(base, attack(rank=1, step=2))
    assert torch.equal(base, attack(rank=1, step=2, global_seed=99))
    others = [attack(rank=0, step=2), attack(rank=1, step=3), attack(rank=1, step=2, seed=4), attack(rank=2, step=1)]
    assert [not torch.equal(base, other) for other in others] == [row.random] * 4


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_in_evaluation_contexts(row, task, context):
    net, x, y = few(task)
    expected = row.make()(net, x, labels_for(row, y))
    prepare(net, grads=True)
    net.eval()
    snapshot_outside = Snapshot(net)
    with context():
        inputs, targets = x.clone(), labels_for(row, y).clone()
        assert inputs.is_inference() == targets.is_inference() == (context is torch.inference_mode)
        snapshot = Snapshot(net)
        x_adv = row.make()(net, inputs, targets)
        snapshot.check()
    snapshot_outside.check()
    assert torch.equal(x_adv, expected)
    assert not x_adv.requires_grad


class Caching(nn.Module):
    """Keeps tables made in its first forward: as attribute, tuple, dictionary entry and buffer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.scale = None
        self.pair = None
        self.by_length = {}
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.9, 1.1, x.shape[-1])
            self.pair = (torch.linspace(1.1, 0.9, x.shape[-1]), torch.full((3, 1, 1), 1.01))
        if x.shape[-1] not in self.by_length:
            self.by_length[x.shape[-1]] = torch.linspace(1.0, 0.95, x.shape[-1])
        if self.mask is None:
            self.mask = torch.ones(x.shape[1:])
        return self.net(x * self.scale * self.pair[0] * self.pair[1] * self.by_length[x.shape[-1]] * self.mask)


@pytest.mark.parametrize("inside", [False, True], ids=["attack-outside", "attack-inside"])
def test_attacks_a_module_that_cached_inference_tensors(row, task, inside):
    net, x, y = few(task)
    target = labels_for(row, y)
    expected = row.make()(Caching(net).eval(), x, target)
    caching = Caching(net).eval()
    with torch.inference_mode():
        caching(x)
        scale = caching.scale
        assert scale.is_inference()
        if inside:
            x_adv = row.make()(caching, x.clone(), target.clone())
    if not inside:
        x_adv = row.make()(caching, x, target)
    assert torch.equal(x_adv, expected)
    assert caching.scale is scale
