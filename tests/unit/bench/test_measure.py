from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.bench.measure import PassCounter, SavedTensors, Timing, interleave, ratios, schedule
from robustdist.bench.models import PreActResNet
from robustdist.bench.output import write_json

CPU = torch.device("cpu")


def test_long_variants_rotate_and_short_ones_are_spread_between_them():
    repeats = {"s": 6, "a": 1, "b": 1, "t": 2, "c": 1}
    assert "".join(schedule(repeats, 0)) == "sstasstbssc"
    for number in range(4):
        order = schedule(repeats, number)
        assert {name: order.count(name) for name in repeats} == repeats
    assert [next(name for name in schedule(repeats, number) if name in "abc") for number in range(4)] == list("abca")
    assert schedule({"x": 2, "y": 2}, 1) == ["y", "y", "x", "x"]


def test_one_timing_per_round_is_the_mean_of_the_calls(monkeypatch):
    calls = []
    clock = iter(range(1000))
    # every reading of a clock is one second later than the one before
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("time.process_time", lambda: float(next(clock)))
    variants = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = interleave(variants, {"a": 3, "b": 1, "c": 1}, 2, CPU)
    assert sorted(calls[:5]) == sorted(calls[5:]) == list("aaabc")
    assert {name: len(measured) for name, measured in timings.items()} == {"a": 2, "b": 2, "c": 2}
    assert {timing for measured in timings.values() for timing in measured} == {Timing(1.0, 3.0)}


def test_ratios_are_taken_within_a_round():
    unit = [Timing(1.0, 10.0), Timing(2.0, 10.0), Timing(4.0, 10.0)]
    measured = [Timing(3.0, 20.0), Timing(4.0, 30.0), Timing(4.0, 50.0)]
    by_cpu, by_wall = ratios(measured, unit, "cpu"), ratios(measured, unit, "wall")
    assert (by_cpu.median, by_cpu.min, by_cpu.max) == (2.0, 1.0, 3.0)
    assert (by_wall.median, by_wall.min, by_wall.max) == (3.0, 2.0, 5.0)


def test_ratio_to_a_clock_that_stood_still_is_finite():
    assert ratios([Timing(0.0, 0.0)], [Timing(0.0, 0.0)], "cpu").median == 0.0


@pytest.mark.parametrize("idiom", ["grad", "backward"])
def test_counter_tells_an_input_gradient_from_a_full_backward(idiom):
    model = PreActResNet(width=4)
    x, y = torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
    with PassCounter(model) as passes:
        for _ in range(3):
            x_adv = x.clone().requires_grad_()
            loss = F.cross_entropy(model(x_adv), y)
            if idiom == "grad":
                torch.autograd.grad(loss, x_adv)
            else:
                loss.backward()
        with torch.no_grad():
            model(x)
    assert (passes.forwards, passes.backwards) == (4, 3)
    assert passes.weight_backwards == (0 if idiom == "grad" else 3)
    assert passes.floor == pytest.approx((7 + passes.weight_backwards) / 3)
    F.cross_entropy(model(x), y).backward()
    assert (passes.forwards, passes.backwards) == (4, 3)


def test_a_loss_of_two_outputs_counts_two_weight_gradients():
    model = PreActResNet(width=4)
    x, y = torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
    with PassCounter(model) as passes:
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(1 - x), y)).backward()
    assert (passes.forwards, passes.backwards, passes.weight_backwards, passes.floor) == (2, 2, 2, 2.0)


def test_double_backward_counts_as_one_more_pass():
    model = PreActResNet(width=4)
    x, y = torch.rand(2, 3, 32, 32, requires_grad=True), torch.tensor([0, 1])
    with PassCounter(model) as passes:
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x, create_graph=True)
        grad.square().sum().backward()
    assert (passes.forwards, passes.backwards, passes.weight_backwards) == (1, 2, 1)


def test_saved_tensors_count_each_storage_once_and_only_while_kept():
    x = torch.rand(256, requires_grad=True)
    with SavedTensors(nn.Identity()) as saved:
        y = x * x  # keeps x twice
        assert saved.peak == 1024
        z = y.exp()  # keeps its output
        assert saved.peak == 2048
        z.sum().backward()
        (x * x).sum().backward()
        assert saved.peak == 2048


def test_saved_tensors_leave_out_the_weights():
    model = nn.Linear(16, 16, bias=False)
    x = torch.rand(2, 16, requires_grad=True)
    with SavedTensors(model) as saved:
        model(x).sum().backward()
    assert saved.peak == x.numel() * 4


def test_saved_tensors_do_not_change_gradients():
    model = PreActResNet(width=4).eval()
    x, y = torch.rand(2, 3, 32, 32, requires_grad=True), torch.tensor([0, 1])
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    with SavedTensors(model):
        (actual,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    assert torch.equal(actual, expected)


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, {"a": 1.5})
    before = path.read_text()
    assert before == '{\n  "a": 1.5\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_cuda_timing_waits_for_the_queue_and_reports_memory_beyond_what_was_held(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    timings = interleave({"a": lambda: events.append("run")}, {"a": 2}, 1, torch.device("cuda", 0))
    assert events == ["synchronize", "reset", "run", "synchronize"] * 2
    assert timings["a"][0].cuda_peak == 250
