"""A muted step leaves no traces in logs and metrics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from robustdist.core.muted import StepMuter


class Logging(nn.Module):
    """What the muter needs to see of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list = []

    def log(self, name, value, **kwargs):
        self.logged.append((name, value))

    def log_dict(self, values, **kwargs):
        self.logged.extend(values.items())


class Module(Logging):
    """Metrics in every place where people keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.alias = self.accuracy
        self.collection = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
        self.by_stage = nn.ModuleDict({"fit": MeanMetric(), "val": MeanMetric()})
        self.by_index = nn.ModuleList([SumMetric(), SumMetric()])
        self.nested = nn.Sequential(nn.Linear(2, 2))
        self.nested.metric = MeanMetric()
        self.wrapped = MinMaxMetric(MeanMetric())
        self.last = nn.Linear(2, 2)

    def step(self, value: float) -> None:
        target = torch.tensor([0, 1, 2])
        self.accuracy(target, target)
        self.alias(target, torch.tensor([1, 1, 1]))
        self.collection.update(value)
        self.by_stage["fit"].update(value)
        self.by_index[1].update(value)
        self.nested.metric.update(value)
        self.wrapped.update(value)
        self.log("value", value)
        self.log_dict({"a": value, "metric": self.accuracy})

    def values(self) -> list[float]:
        metrics = [self.accuracy, *self.collection.values(), self.by_stage["fit"], self.by_index[1]]
        metrics += [self.nested.metric, self.wrapped._base_metric]
        return [float(metric.compute()) for metric in metrics]


def structure(module: nn.Module) -> list:
    """Names, order and identity of all parts, and the instance's own attributes."""
    parts = [(name, id(child)) for name, child in module.named_modules(remove_duplicate=False)]
    return [*parts, sorted(vars(module))]


def test_a_muted_step_is_not_counted_and_not_logged():
    module, twin = Module(), Module()
    muter = StepMuter()
    for value in (1.0, 5.0):
        module.step(value)
        twin.step(value)
        with muter(module):
            module.step(100.0)
            module.step(200.0)
    assert module.values() == twin.values()
    assert [name for name, _ in module.logged] == ["value", "a", "metric"] * 2
    assert module.logged[0] == ("value", 1.0)


def test_the_muted_step_itself_sees_working_metrics():
    module = Module()
    module.step(3.0)
    with StepMuter()(module):
        assert module.alias is module.accuracy
        assert float(module.by_stage["fit"](7.0)) == 7.0
        module.collection.update(2.0)
        assert {name: float(value) for name, value in module.collection.compute().items()} == {"mean": 2.0, "sum": 2.0}
    assert float(module.by_stage["fit"].compute()) == 3.0


def test_every_muted_step_starts_from_empty_metrics():
    module, muter = Module(), StepMuter()
    for value in (1.0, 4.0):
        with muter(module):
            module.by_index[1].update(value)
            assert float(module.by_index[1].compute()) == value


@pytest.mark.parametrize("fails", [False, True])
def test_every_part_is_put_back_in_its_place(fails):
    module = Module()
    before = structure(module)
    try:
        with StepMuter()(module):
            assert structure(module) != before
            if fails:
                raise ArithmeticError("inside")
    except ArithmeticError:
        assert fails
    assert structure(module) == before
    assert module.alias is module.accuracy
    module.log("after", 1)
    assert module.logged == [("after", 1)]


def test_an_error_inside_is_not_swallowed():
    with pytest.raises(ArithmeticError, match="inside"), StepMuter()(Module()):
        raise ArithmeticError("inside")


def test_a_logger_that_somebody_put_on_the_instance_comes_back():
    module, calls = Module(), []
    module.log = mine = lambda *args: calls.append(args)
    with StepMuter()(module):
        module.log("x", 1)
        module.log_dict({"y": 2})
    assert vars(module)["log"] is mine
    assert "log_dict" not in vars(module)
    assert calls == []
    module.log("x", 1)
    assert calls == [("x", 1)]


def test_modules_that_log_inside_a_module_are_muted_too():
    module = Module()
    module.inner = Logging()
    with StepMuter()(module):
        module.inner.log("inner", 1)
        module.inner.log_dict({"inner": 1})
    assert module.inner.logged == []
    module.inner.log("inner", 2)
    assert module.inner.logged == [("inner", 2)]
    assert "log" not in vars(module.inner)


def test_contexts_nest():
    module, muter = Module(), StepMuter()
    before = structure(module)
    with muter(module), muter(module):
        module.step(1.0)
    assert structure(module) == before
    module.step(2.0)
    assert len(module.logged) == 3
    assert float(module.by_index[1].compute()) == 2.0


def test_one_stand_in_per_metric_is_made_and_kept(monkeypatch):
    clones = []
    original = MeanMetric.clone
    monkeypatch.setattr(MeanMetric, "clone", lambda self: clones.append(self) or original(self))
    module, muter = nn.Module(), StepMuter()
    module.metric = MeanMetric()
    for value in (1.0, 2.0, 3.0):
        module.metric.update(value)  # the hash of a metric changes with its state
        with muter(module):
            module.metric.update(9.0)
    assert len(clones) == 1
    assert float(module.metric.compute()) == 2.0


def test_a_stand_in_follows_its_metric_to_another_device():
    module, muter = nn.Module(), StepMuter()
    module.metric, module.collection = MeanMetric(), MetricCollection([SumMetric()])
    with muter(module):
        assert module.metric.device.type == "cpu"
    module.metric.to("meta")
    module.collection.to("meta")
    with muter(module):
        assert module.metric.device.type == "meta"
        assert module.metric.mean_value.device.type == "meta"
        assert module.collection["SumMetric"].device.type == "meta"


def test_two_modules_may_share_one_muter():
    first, second, muter = Module(), Module(), StepMuter()
    for module in (first, second):
        with muter(module):
            module.step(50.0)
        module.step(1.0)
    assert first.values() == second.values()
    assert first.accuracy is not second.accuracy


def test_a_tracker_counts_only_loud_steps():
    module = nn.Module()
    module.tracker = MetricTracker(MeanMetric(), maximize=True)
    module.tracker.increment()
    module.tracker.update(1.0)
    with StepMuter()(module):
        module.tracker.update(99.0)
    assert float(module.tracker.compute()) == 1.0


def test_parameters_are_shared_with_the_muted_step():
    module = Module()
    weight = module.layer.weight
    with StepMuter()(module):
        assert module.layer.weight is weight
        module.layer(torch.ones(1, 2)).sum().backward()
    assert bool(weight.grad.abs().sum() > 0)


def test_state_dicts_and_copies_are_those_of_the_loud_module():
    module = Module()
    module.accuracy.persistent(True)
    module.step(1.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with StepMuter()(module):
        module.step(7.0)
    twin = copy.deepcopy(module)
    for found in (module.state_dict(), twin.state_dict()):
        assert list(found) == list(before)
        assert all(torch.equal(found[name], value) for name, value in before.items())
