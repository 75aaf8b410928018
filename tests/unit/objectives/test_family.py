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
from robustdist.attacks import PGD, Problem
from robustdist.core.rng import Noise
from robustdist.core.testing import TinyNet, toy_images
from robustdist.errors import UsageError
from robustdist.objectives import (
    AWP,
    DAT,
    FGSMRS,
    MART,
    NFGSM,
    PGDAT,
    TRADES,
    ConAdv,
    FastBAT,
    FreeAT,
    FreeLB,
    FriendlyAT,
    GradAlign,
    Objective,
    ObjectiveContext,
)


@dataclass(frozen=True)
class Row:
    """One objective under test.

    ``losses`` names the inputs of every call of the ordinary loss: "adv" from the attack, "clean", or "own".
    ``forwards`` are those with PGD of three steps: a of an attack and r a reference, both in eval mode; t for the loss
    and g the same with a gradient in the input. ``targets`` is what the attack gets: "y", "reference" or None for an
    objective that solves the inner problem itself. ``plain`` objectives are one ordinary loss and nothing else; those
    that are not ``random`` draw nothing.
    """

    id: str
    make: Callable[[], Objective]
    losses: tuple[str, ...]
    forwards: str
    shown: str
    logs: frozenset[str] = frozenset()
    targets: str | None = "y"
    plain: bool = False
    needs_classes: bool = False
    random: bool = True

    @property
    def passes(self) -> int:
        return len(self.losses)


DAT_SHOWN = "DAT(clean_weight={}, unlabeled_weight={}, unlabeled='{}')"
DAT_LOGS = frozenset({"clean_loss", "adv_loss"})
TRADES_OPTIONS: dict[str, Any] = {"logs": frozenset({"divergence"}), "targets": "reference"}
BAT_LOGS = frozenset({"fast_bat/interior_fraction", "fast_bat/ig_ratio"})

ROWS = [
    Row("PGDAT", PGDAT, ("adv",), "aaat", "PGDAT()", plain=True),
    Row("DAT", DAT, ("adv", "clean"), "aaatt", DAT_SHOWN.format(1.0, 1.0, "pseudo"), DAT_LOGS),
    Row("DAT-0", lambda: DAT(0.0), ("adv",), "aaat", DAT_SHOWN.format(0.0, 1.0, "pseudo"), plain=True),
    Row("DAT-kl", lambda: DAT(0.3, 2.0, "kl"), ("adv", "clean"), "aaatt", DAT_SHOWN.format(0.3, 2.0, "kl"), DAT_LOGS),
    Row("TRADES", TRADES, ("clean",), "raaatt", "TRADES(beta=6.0)", **TRADES_OPTIONS),
    Row("MART", MART, ("adv",), "aaatt", "MART(beta=5.0)", needs_classes=True),
    Row("FGSMRS", FGSMRS, ("adv",), "at", "FGSMRS(step_factor=1.25)", plain=True),
    Row("NFGSM", NFGSM, ("adv",), "at", "NFGSM(noise=2.0, clip_noise=True)", plain=True),
    Row(
        "GradAlign", GradAlign, ("adv",), "atgg", "GradAlign(weight=0.2, step_factor=1.25)", frozenset({"misalignment"})
    ),
    Row("GradAlign-0", lambda: GradAlign(0), ("adv",), "at", "GradAlign(weight=0, step_factor=1.25)", plain=True),
    Row(
        "FastBAT",
        FastBAT,
        ("own",),
        "ggg",
        "FastBAT(step='relative', step_factor=2.0, implicit_weight=0.1)",
        BAT_LOGS,
        targets=None,
    ),
    Row(
        "FastBAT-direct",
        lambda: FastBAT("1/4", implicit_weight=0.0),
        ("own",),
        "ggt",
        "FastBAT(step=0.25, step_factor=2.0, implicit_weight=0.0)",
        targets=None,
        plain=True,
    ),
    Row(
        "FreeAT",
        FreeAT,
        ("own",),
        "g",
        "FreeAT(replays=4, step_factor=1.0)",
        targets=None,
        plain=True,
        random=False,
    ),
    Row(
        "FreeLB",
        FreeLB,
        ("own", "own", "own"),
        "ggg",
        "FreeLB(steps=3)",
        frozenset({"first_loss", "last_loss"}),
        targets=None,
    ),
    Row("FreeLB-1", lambda: FreeLB(1), ("own",), "g", "FreeLB(steps=1)", targets=None, plain=True),
    Row(
        "FriendlyAT",
        lambda: FriendlyAT(tau=3),
        ("adv",),
        "aaat",
        "FriendlyAT(tau=3, noise_std=0.0)",
        plain=True,
        needs_classes=True,
    ),
    Row("ConAdv", ConAdv, ("clean", "adv"), "aaatt", "ConAdv(stale=1, clean_weight=1.0)", DAT_LOGS),
    Row("AWP", AWP, ("adv", "adv"), "aaatt", "AWP(base=PGDAT(), gamma=0.01, warm_up=0.0)"),
    Row("AWP-0", lambda: AWP(gamma=0.0), ("adv",), "aaat", "AWP(base=PGDAT(), gamma=0.0, warm_up=0.0)", plain=True),
    Row(
        "AWP-TRADES",
        lambda: AWP(TRADES(), 0.005),
        ("clean", "clean"),
        "raaatttt",
        "AWP(base=TRADES(beta=6.0), gamma=0.005, warm_up=0.0)",
        **TRADES_OPTIONS,
    ),
]


@pytest.fixture(params=ROWS, ids=lambda row: row.id)
def row(request) -> Row:
    return request.param


@dataclass
class Recorder:
    """A context around a linear model that notes every call; ``skips`` says which ordinary losses are None."""

    skips: list[bool] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    attacked: list[tuple[Tensor, Any]] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = nn.Linear(4, 5, bias=False)
        self.weight = self.module.weight
        self.x, self.y = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0])
        self.x_adv = self.x + 1
        self.context = ObjectiveContext(
            x=self.x,
            y=self.y,
            attack=self._attack,
            loss=self._loss,
            logits=self._logits,
            loss_and_logits=lambda x: (self._loss(x), self._logits(x)),
            reference=self._reference,
            problem=self._problem,
            from_pixels=lambda pixels: pixels,
            take=lambda rows, y=None: NotImplemented,
            module=self.module,
        )

    def _logits(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T

    def _reference(self, x: Tensor) -> Tensor:
        self.references.append(self._logits(x).detach())
        return self.references[-1]

    def _problem(self) -> Problem:
        return PGD(eps=0.1).problem(self._logits, self.x, self.y, Noise(0))

    def _attack(self, x: Tensor, y: Any, **changes: Any) -> Tensor:
        self.attacked.append((x, y))
        return self.x_adv

    def _loss(self, x: Tensor) -> Tensor | None:
        self.losses.append(x)
        skipped = self.skips.pop(0) if self.skips else False
        return None if skipped else F.cross_entropy(self._logits(x), self.y)


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
    assert len(recorder.attacked) == (row.targets is not None)
    for x, y in recorder.attacked:
        assert x is recorder.x
        assert y is (recorder.y if row.targets == "y" else recorder.references[0])
    assert row.make().attacks_predictions == (row.targets == "reference")


def test_the_ordinary_loss_sees_these_inputs(row):
    recorder = Recorder()
    objective = row.make()
    objective.compute(recorder.context)
    names = {id(recorder.x): "clean", id(recorder.x_adv): "adv"}
    assert tuple(names.get(id(x), "own") for x in recorder.losses) == row.losses
    assert objective.needs_second_pass == (not row.plain)


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
    recorder.skips = [False] * skipped + [True]
    weight = recorder.weight.detach().clone()
    objective = row.make()
    loss = objective.compute(recorder.context)
    assert (loss is None) == (skipped < row.passes)
    if loss is None:
        assert torch.equal(recorder.weight, weight)
        assert recorder.context.logs == {} or isinstance(objective, AWP)
        assert len(recorder.losses) == skipped + 1


def test_the_weights_are_the_callers_after_the_backward_pass(row):
    recorder = Recorder()
    weight = recorder.weight.detach().clone()
    objective = row.make()
    objective.compute(recorder.context).backward()
    objective.after_backward()
    assert torch.equal(recorder.weight, weight)
    assert bool(recorder.weight.grad.abs().sum() > 0)


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
    seen: list[str] = []
    kinds = {(False, False): "r", (False, True): "a", (True, False): "t", (True, True): "g"}

    class Watched(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(kinds[self.training, x.requires_grad])
            assert torch.is_grad_enabled() == (seen[-1] != "r")
            return super().forward(x)

    net = Watched().train()
    row.make()(net, *toy_images(4), attack=PGD(eps=0.1, steps=3))
    assert "".join(seen) == row.forwards
    assert net.training


def test_random_starts_follow_seed_rank_and_step(row):
    net = TinyNet()
    x, y = toy_images(8)

    def gradient(seed: int = 0, **key: int) -> Tensor:
        net.zero_grad()
        objective = row.make()
        objective(net, x, y, attack=PGD(eps=0.3, steps=1, step_size=0.01, seed=seed), **key).backward()
        objective.after_backward()
        return torch.cat([grad.flatten() for grad in gradients(net)])

    first = gradient()
    torch.rand(5)  # the global generators play no part
    assert torch.equal(gradient(), first)
    assert torch.equal(gradient(rank=0, step=0), first)
    for other in (gradient(step=1), gradient(rank=1), gradient(seed=1)):
        assert torch.equal(other, first) != row.random


def test_the_ordinary_loss_is_the_callers(row):
    net = TinyNet()
    x, y = toy_images(5)
    targets = F.one_hot(y, 4).float()
    attack = PGD(eps=0.1, steps=1, attack_loss=lambda logits, y: (logits - y).square().sum(1))
    seen = []

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        seen.append((logits.shape, y is targets))
        return (logits - y).square().mean()

    if row.needs_classes:
        with pytest.raises(UsageError, match=r"not class indices|stops at wrong classes"):
            row.make()(net, x, targets, attack=attack, loss_fn=loss_fn)
        return
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


def settings(objective: Objective) -> dict[str, Any]:
    return {name: settings(value) if isinstance(value, Objective) else value for name, value in vars(objective).items()}


def test_the_repr_makes_an_equal_one(row):
    again = eval(row.shown, vars(robustdist.objectives))
    assert type(again) is type(row.make())
    assert settings(again) == settings(row.make())


def test_an_objective_without_compute_cannot_be_made():
    class Empty(Objective):
        pass

    with pytest.raises(TypeError, match="compute"):
        Empty()
