from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from robustdist.core import trial
from robustdist.core.trial import (
    FastPathSettings,
    Probe,
    Trial,
    agreement,
    choose,
    combinations,
    compare,
    difference,
)

PLAIN = FastPathSettings()
CL = FastPathSettings(channels_last=True)
FOLD = FastPathSettings(fold_batch_norm=True)
BF16 = FastPathSettings(precision="bf16")
BOTH = FastPathSettings(channels_last=True, fold_batch_norm=True)


def measured(seconds):
    return [Trial(way, value, 1.0) for way, value in seconds.items()]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({PLAIN: 1.0, CL: 0.96, FOLD: 0.951}, PLAIN),
        ({PLAIN: 1.0, CL: 0.94}, CL),
        ({PLAIN: 1.0, CL: 0.90, FOLD: 0.86, BOTH: 0.80}, BOTH),
        # a second change must win by itself
        ({PLAIN: 1.0, CL: 0.80, BOTH: 0.77}, CL),
        ({PLAIN: 1.0, CL: 1.2, FOLD: 1.3, BOTH: 1.4}, PLAIN),
    ],
)
def test_a_change_must_win_by_more_than_five_per_cent(seconds, chosen):
    assert choose(measured(seconds)) == chosen


def test_combinations_begin_with_the_fewest_changes():
    ways = combinations(["inherit", "bf16"], [False, True], [False, True])
    assert len(set(ways)) == 8
    assert ways[0] == PLAIN
    assert [way.num_changes for way in ways] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert combinations(["32"], [True], [False]) == [FastPathSettings(precision="32", channels_last=True)]


def test_settings_in_words():
    assert str(PLAIN) == "plain"
    assert (
        str(FastPathSettings("bf16", True, True, True)) == "precision bf16 + channels_last + fold_batch_norm + compile"
    )
    assert not BF16.needs_whole_weights
    assert all(way.needs_whole_weights for way in (CL, FOLD, PLAIN.compiled(True)))
    assert PLAIN.compiled(True).compiled(False) == PLAIN


def test_agreement_weighs_signs_by_the_gradient():
    reference = torch.tensor([4.0, -3.0, 2.0, -1.0, 0.0])
    assert agreement(reference, reference) == 1.0
    assert agreement(reference, torch.tensor([9.0, -9.0, 9.0, 9.0, 9.0])) == pytest.approx(0.9)
    assert agreement(reference, -reference) == 0.0
    assert agreement(reference, torch.tensor([0.0, -3.0, 2.0, -1.0, 0.0])) == pytest.approx(0.6)
    assert agreement(torch.zeros(3), torch.ones(3)) == 1.0


def test_agreement_is_what_a_linf_step_keeps_of_the_first_order_gain():
    reference, grad = torch.randn(2, 500, dtype=torch.float64).unbind()
    kept = (reference * grad.sign()).sum() / reference.abs().sum()
    assert float(kept) == pytest.approx(2 * agreement(reference, grad) - 1)


def test_difference_is_relative_to_the_largest_logit():
    assert difference(torch.tensor([[1.0, -4.0]]), torch.tensor([[1.5, -4.0]])) == pytest.approx(0.125)
    assert math.isnan(difference(torch.ones(2, 2), torch.full((2, 2), math.nan)))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)
        self.modes = []

    def forward(self, x):
        self.modes.append(self.training)
        return self.dropout(self.linear(x))


def test_a_probe_sees_the_model_as_the_attack_does_and_leaves_it():
    model = Counting()
    x = torch.rand(6, 4)
    state = torch.get_rng_state()
    for mode, mode_seen in (("eval", False), ("train", True)):
        probe = Probe(model, x, model, None, mode)
        assert torch.equal(probe.logits(), probe.logits())  # also with dropout: the same random numbers each time
        assert torch.equal(probe.gradient(), probe.gradient())
        assert set(model.modes) == {mode_seen}
        model.modes.clear()
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not probe.logits().requires_grad


def test_a_probe_takes_the_loss_of_the_attack():
    model = nn.Linear(4, 3)
    probe = Probe(model, torch.rand(6, 4), model, lambda logits: logits[:, 1].sum(), "eval")
    assert torch.allclose(probe.gradient(), model.weight[1].expand(6, 4))
    default = Probe(model, torch.rand(6, 4), model, None, "eval").gradient()
    assert default.abs().max() > 0


def test_a_probe_makes_gradients_finite_as_attacks_do():
    model = nn.Linear(4, 3)
    probe = Probe(model, torch.rand(6, 4), model, lambda logits: (logits - logits.detach()).pow(0.5).sum(), "eval")
    assert bool(torch.isfinite(probe.gradient()).all())


def test_a_probe_works_in_inference_mode():
    model = nn.Linear(4, 3)
    with torch.inference_mode():
        probe = Probe(model, torch.rand(6, 4), model, None, "eval")
        assert probe.gradient().shape == (6, 4)
        assert probe.seconds() > 0


def test_ways_are_measured_in_turn_and_the_shortest_time_counts(monkeypatch):
    model = nn.Linear(4, 3)
    probe = Probe(model, torch.rand(6, 4), model, None, "eval")
    order = []

    @contextmanager
    def applied(way):
        order.append(way)
        yield

    times = iter([5.0, 4.0, 3.0, 9.0, 8.0, 1.0])
    monkeypatch.setattr(probe, "seconds", lambda: next(times))
    trials, notes = compare(probe, [PLAIN, CL], applied)
    assert order == [PLAIN, CL] * 4  # once for the gradients, three rounds for the times
    assert notes == []
    assert [(t.settings, t.seconds, t.agreement) for t in trials] == [(PLAIN, 3.0, 1.0), (CL, 1.0, 1.0)]
    assert choose(trials) == CL


def test_ways_that_fail_or_lose_the_gradient_are_left_out():
    model = nn.Linear(4, 3)
    scale = 1.0

    def forward(x):
        if scale == 0:
            raise RuntimeError("view size is not compatible\nuse reshape")
        return scale * model(x)

    @contextmanager
    def applied(way):
        nonlocal scale
        scale = {PLAIN: 1.0, BF16: -1.0, CL: 0.0, FOLD: 2.0}[way]
        yield
        scale = 1.0

    probe = Probe(model, torch.rand(6, 4), forward, lambda logits: logits.sum(), "eval")
    trials, notes = compare(probe, [PLAIN, BF16, CL, FOLD], applied)
    assert [t.settings for t in trials] == [PLAIN, FOLD]
    assert notes == [
        "precision bf16 is left out: it keeps the sign of 0.0% of the gradient",
        "channels_last is left out: view size is not compatible",
    ]
    # what fails in the plain way is the user's
    with pytest.raises(RuntimeError, match="view size"):
        compare(probe, [CL, PLAIN], applied)


def test_the_clock_is_processor_time_with_one_thread_on_the_cpu(monkeypatch):
    model = nn.Linear(4, 3)
    probe = Probe(model, torch.rand(6, 4), model, None, "eval")
    clocks = {"process_time": iter([1.0, 3.0]), "perf_counter": iter([10.0, 15.0])}
    for name, values in clocks.items():
        monkeypatch.setattr(trial.time, name, lambda values=values: next(values))
    assert probe.seconds() == 2.0
    torch.set_num_threads(2)
    assert probe.seconds() == 5.0
