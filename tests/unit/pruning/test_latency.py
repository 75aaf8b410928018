"""What is measured: this process' own work, in turns, with everything put back."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from robustdist.errors import UsageError
from robustdist.pruning import latency
from robustdist.pruning.latency import cpu_times, forward_times


class Clock:
    """A processor whose time moves only when told to."""

    now = 0.0

    def process_time(self) -> float:
        return self.now


def test_the_median_of_calls_that_take_turns(monkeypatch):
    clock, calls = Clock(), []
    monkeypatch.setattr(latency, "time", clock)

    def work(name: str, costs: list[float]) -> None:
        calls.append(name)
        clock.now += costs[calls.count(name) - 1]

    a, b = [9.0, 1.0, 2.0, 90.0], [9.0, 4.0, 3.0, 5.0]
    found = cpu_times({"a": lambda: work("a", a), "b": lambda: work("b", b)}, rounds=3, warmup=1)
    assert found == {"a": 2000.0, "b": 4000.0}
    assert calls == ["a", "b", "a", "b", "a", "b", "a", "b"]


def test_waiting_is_not_counted():
    found = cpu_times({"waits": lambda: time.sleep(0.02)}, rounds=3, warmup=0)
    assert found["waits"] < 10


def test_models_are_evaluated_on_one_thread_and_put_back():
    seen = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.training, tuple(x.shape), torch.get_num_threads(), torch.is_grad_enabled()))
            return super().forward(x)

    net, threads = Net(3, 2).train(), torch.get_num_threads()
    found = forward_times({"net": net}, torch.randn(2, 3), batch_sizes=(1, 5), rounds=1, warmup=0)
    assert set(found["net"]) == {1, 5}
    assert seen == [(False, (1, 3), 1, False), (False, (5, 3), 1, False)]
    assert net.training
    assert torch.get_num_threads() == threads
    with pytest.raises(UsageError, match="rounds=0"):
        cpu_times({}, rounds=0)


def test_the_number_of_threads_comes_back_after_an_error():
    threads = torch.get_num_threads()

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        cpu_times({"fails": fail})
    assert torch.get_num_threads() == threads
