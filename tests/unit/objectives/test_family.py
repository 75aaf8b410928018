"""What every objective has to obey. A new objective is one more row in ``ROWS``."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import robustdist.objectives
from robustdist.attacks import PGD
from robustdist.core.testing import TinyNet, toy_images
from robustdist.objectives import DAT, PGDAT, Objective, ObjectiveContext


@dataclass(frozen=True)
class Row:
    """One objective: how it is made, how often it calls the ordinary loss, what it logs and how its repr reads."""

    id: str
    make: Callable[[], Objective]
    passes: int
    logs: frozenset[str]
    shown: str


ROWS = [
    Row("PGDAT", PGDAT, 1, frozenset(), "PGDAT()"),
    Row("DAT", DAT, 2, frozenset({"clean_loss", "adv_loss"}), "DAT(clean_weight=1.0)"),
    Row("DAT-0", lambda: DAT(clean_weight=0.0), 1, frozenset(), "DAT(clean_weight=0.0)"),
    Row("DAT-0.3", lambda: DAT(0.3), 2, frozenset({"clean_loss", "adv_loss"}), "DAT(clean_weight=0.3)"),
]


@pytest.fixture(params=ROWS, ids=lambda row: row.id)
def row(request) -> Row:
    return request.param


@dataclass
class Recorder:
    """A context that notes every call; the ordinary loss returns what ``outputs`` says, then its own value."""

    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    attacked: list[tuple[Tensor, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.x, self.y = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0])
        self.x_adv = self.x + 1
        self.context = ObjectiveContext(self.x, self.y, self._attack, self._loss, lambda x: x.flatten(1) * self.weight)

    def _attack(self, x: Tensor, y: Any) -> Tensor:
        self.attacked.append((x, y))
        return self.x_adv

    def _loss(self, x: Tensor) -> Tensor | None:
        self.losses.append(x)
        return self.outputs.pop(0) if self.outputs else self.weight * x.mean()


def rng_states() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest]


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters()]


def test_every_public_objective_has_a_row():
    exported = {getattr(robustdist.objectives, name) for name in robustdist.objectives.__all__}
    concrete = {cls for cls in exported if issubclass(cls, Objective) and cls is not Objective}
    assert concrete == {type(row.make()) for row in ROWS}


def test_the_clean_batch_is_attacked_once(row):
    recorder = Recorder()
    row.make().compute(recorder.context)
    ((x, y),) = recorder.attacked
    assert x is recorder.x
    assert y is recorder.y


def test_the_first_pass_is_the_loud_one_and_sees_the_attack(row):
    recorder = Recorder()
    objective = row.make()
    objective.compute(recorder.context)
    assert len(recorder.losses) == row.passes
    assert recorder.losses[0] is recorder.x_adv
    assert all(x is recorder.x for x in recorder.losses[1:])
    assert objective.needs_second_pass == (row.passes > 1)


def test_logs_are_detached_scalars(row):
    recorder = Recorder()
    loss = row.make().compute(recorder.context)
    assert recorder.context.logs.keys() == row.logs
    assert all(value.dim() == 0 and not value.requires_grad for value in recorder.context.logs.values())
    assert loss.requires_grad
    assert loss.dim() == 0


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_batch_that_the_ordinary_loss_skips_is_skipped(row, skipped):
    recorder = Recorder()
    recorder.outputs = [recorder.weight * 1.0] * skipped + [None]
    loss = row.make().compute(recorder.context)
    assert (loss is None) == (skipped < row.passes)
    if loss is None:
        assert recorder.context.logs == {}
        assert len(recorder.losses) == skipped + 1


def test_a_plain_module_trains_on_it(row):
    net, attack = TinyNet(), PGD(eps=0.1, steps=2)
    x, y = toy_images(6)
    kept = x.clone()
    before = rng_states()
    loss = row.make()(net, x, y, attack=attack)
    assert rng_states() == before
    assert all(parameter.grad is None for parameter in net.parameters())
    assert loss.shape == ()
    loss.backward()
    assert all(bool(grad.abs().sum() > 0) for grad in gradients(net))
    assert torch.equal(x, kept)
    assert not x.requires_grad


def test_modes_are_those_of_the_caller(row):
    seen: list[tuple[bool, bool]] = []  # (training, gradient of the weights is recorded)

    class Watched(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, x.requires_grad))
            return super().forward(x)

    net = Watched().train()
    row.make()(net, *toy_images(4), attack=PGD(eps=0.1, steps=3))
    assert seen == [(False, True)] * 3 + [(True, False)] * row.passes
    assert net.training


def test_random_starts_follow_seed_rank_and_step(row):
    net = TinyNet()
    x, y = toy_images(8)

    def gradient(seed: int = 0, **key: int) -> Tensor:
        net.zero_grad()
        row.make()(net, x, y, attack=PGD(eps=0.3, steps=1, step_size=0.01, seed=seed), **key).backward()
        return torch.cat([grad.flatten() for grad in gradients(net)])

    first = gradient()
    torch.rand(5)  # the global generators play no part
    assert torch.equal(gradient(), first)
    assert torch.equal(gradient(rank=0, step=0), first)
    for other in (gradient(step=1), gradient(rank=1), gradient(seed=1)):
        assert not torch.equal(other, first)


def test_the_ordinary_loss_is_the_callers(row):
    net = TinyNet()
    x, y = toy_images(5)
    targets = F.one_hot(y, 4).float()
    attack = PGD(eps=0.1, steps=1, attack_loss=lambda logits, y: (logits - y).square().sum(1))
    seen = []

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        seen.append((logits.shape, y is targets))
        return (logits - y).square().mean()

    loss = row.make()(net, x, targets, attack=attack, loss_fn=loss_fn)
    assert seen == [((5, 4), True)] * row.passes
    assert bool(torch.isfinite(loss))


def test_models_with_a_mapping_for_output_work(row):
    class Wrapped(TinyNet):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x)}

    plain, wrapped = TinyNet(), Wrapped()
    wrapped.load_state_dict(plain.state_dict())
    x, y = toy_images(4)
    losses = [row.make()(net, x, y, attack=PGD(eps=0.1, steps=2)) for net in (plain, wrapped)]
    assert torch.equal(losses[0], losses[1])


def test_copies_and_pickles_compute_the_same(row):
    def value(objective: Objective) -> Tensor:
        torch.manual_seed(0)  # the recorder draws its batch
        return objective.compute(Recorder().context)

    objective = row.make()
    for twin in (copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
        assert twin is not objective
        assert twin.needs_second_pass == objective.needs_second_pass
        assert torch.equal(value(twin), value(objective))


def test_the_repr_is_the_call_that_makes_it(row):
    assert repr(row.make()) == row.shown
    assert vars(eval(row.shown, {"DAT": DAT, "PGDAT": PGDAT})) == vars(row.make())


def test_an_objective_without_compute_cannot_be_made():
    class Empty(Objective):
        pass

    with pytest.raises(TypeError, match="compute"):
        Empty()
