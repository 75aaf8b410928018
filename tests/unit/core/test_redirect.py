"""The step interceptor on stand-ins for strategies and modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from robustdist.core.redirect import StepInterceptor, check_module_can_be_called, check_step_can_be_intercepted
from robustdist.errors import UsageError


class Module(nn.Module):
    """A module whose step notes what it was given."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.seen: list[tuple] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def training_step(self, batch, batch_idx=0, **kwargs):
        self.seen.append((batch, batch_idx, kwargs))
        return f"step({batch})"


class Strategy:
    """As a single-device strategy: its step calls the module's."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.lightning_module = Module() if module is None else module
        self.num_calls = 0

    def training_step(self, *args, **kwargs):
        self.num_calls += 1
        return self.lightning_module.training_step(*args, **kwargs)


class Wrapping(Strategy):
    """As DDP: the step is carried through the forward of a wrapper around the module."""

    fail_before_call = False

    def training_step(self, *args, **kwargs):
        self.num_calls += 1
        module = self.lightning_module
        original = module.forward

        def redirected(*args, **kwargs):
            module.forward = original
            return module.training_step(*args, **kwargs)

        module.forward = redirected
        if self.fail_before_call:
            raise ConnectionError("a rank is gone")
        return module(*args, **kwargs)


def tag(name: str):
    def transform(next_step, batch, *args, **kwargs):
        return f"{name}[{next_step(f'{batch}>{name}', *args, **kwargs)}]"

    return transform


@pytest.fixture(params=[Strategy, Wrapping])
def strategy(request) -> Strategy:
    return request.param()


def untouched(strategy: Strategy) -> bool:
    """Whether nothing of ours is left on strategy and module."""
    module_attributes = set(vars(strategy.lightning_module)) & {"training_step", "forward"}
    strategy_attributes = set(vars(strategy)) - {"lightning_module", "num_calls", "fail_before_call"}
    return not module_attributes and not strategy_attributes


# --- the chain


def test_transforms_nest_by_order_and_see_all_arguments(strategy):
    interceptor = StepInterceptor.of(strategy)
    for name, order in (("b", 0), ("d", 5), ("a", -1), ("c", 0)):
        interceptor.add(tag(name), order)
    result = strategy.training_step("x", 7, dataloader_idx=1)
    assert result == "a[b[c[d[step(x>a>b>c>d)]]]]"
    assert strategy.lightning_module.seen == [("x>a>b>c>d", 7, {"dataloader_idx": 1})]
    assert strategy.num_calls == 1


def test_a_transform_may_run_the_step_twice_or_not_at_all(strategy):
    def twice(next_step, batch, *args):
        return next_step(batch, *args) + next_step("again", *args)

    interceptor = StepInterceptor.of(strategy)
    interceptor.add(twice, 0)
    interceptor.add(tag("in"), 1)
    assert strategy.training_step("x", 3) == "in[step(x>in)]in[step(again>in)]"
    assert [entry[1] for entry in strategy.lightning_module.seen] == [3, 3]
    skip = lambda next_step, batch, *args: None  # noqa: E731
    interceptor.add(skip, -1)
    assert strategy.training_step("x", 4) is None
    assert len(strategy.lightning_module.seen) == 2


def test_a_transform_added_twice_runs_once(strategy):
    class Owner:
        def transform(self, next_step, batch, *args):
            return f"owner[{next_step(batch, *args)}]"

    first, second = Owner(), Owner()
    interceptor = StepInterceptor.of(strategy)
    interceptor.add(first.transform, 0)
    interceptor.add(first.transform, 9)  # another bound method of the same object
    assert strategy.training_step("x") == "owner[step(x)]"
    interceptor.add(second.transform)
    assert strategy.training_step("x") == "owner[owner[step(x)]]"
    interceptor.remove(first.transform)
    assert strategy.training_step("x") == "owner[step(x)]"
    interceptor.remove(second.transform)
    assert untouched(strategy)


def test_transforms_can_come_and_go_between_steps(strategy):
    one, two = tag("one"), tag("two")
    StepInterceptor.of(strategy).add(one)
    assert strategy.training_step("x") == "one[step(x>one)]"
    StepInterceptor.of(strategy).add(two, -1)
    assert strategy.training_step("x") == "two[one[step(x>two>one)]]"
    StepInterceptor.of(strategy).remove(one)
    assert strategy.training_step("x") == "two[step(x>two)]"
    StepInterceptor.of(strategy).remove(two)
    assert strategy.training_step("x") == "step(x)"
    assert strategy.num_calls == 4


def test_a_transform_may_remove_itself_in_its_step(strategy):
    def once(next_step, batch, *args):
        StepInterceptor.of(strategy).remove(once)
        return f"once[{next_step(batch, *args)}]"

    StepInterceptor.of(strategy).add(once)
    assert strategy.training_step("x") == "once[step(x)]"
    assert untouched(strategy)
    assert strategy.training_step("x") == "step(x)"


def test_gradients_flow_through_the_chain(strategy):
    class Learner(Module):
        def training_step(self, batch):
            return self(batch).sum()

    strategy.lightning_module = learner = Learner()
    StepInterceptor.of(strategy).add(lambda next_step, batch: next_step(batch) + 0.5 * next_step(batch + 1))
    strategy.training_step(torch.tensor([1.0, 2.0])).backward()
    assert learner.weight.grad.item() == 3.0 + 0.5 * 5.0


# --- one interceptor, and nothing left behind


def test_all_users_of_a_strategy_share_one_interceptor():
    strategy, other = Strategy(), Strategy()
    interceptor = StepInterceptor.of(strategy)
    assert StepInterceptor.of(strategy) is interceptor
    assert StepInterceptor.of(other) is not interceptor
    assert not interceptor.active
    interceptor.add(tag("a"))
    assert interceptor.active
    assert not StepInterceptor.of(other).active


def test_between_steps_the_module_holds_nothing(strategy):
    StepInterceptor.of(strategy).add(tag("a"))
    before = dict(vars(strategy.lightning_module))
    strategy.training_step("x")
    assert vars(strategy.lightning_module).keys() == before.keys()
    assert strategy.lightning_module.training_step("y") == "step(y)"  # called directly there is no chain


def test_the_last_removal_leaves_the_strategy_as_it_was(strategy):
    transforms = [tag("a"), tag("b")]
    interceptor = StepInterceptor.of(strategy)
    for transform in transforms:
        interceptor.add(transform)
    assert not untouched(strategy)
    interceptor.remove(transforms[0])
    assert interceptor.active
    interceptor.remove(transforms[1])
    assert not interceptor.active
    assert untouched(strategy)
    assert strategy.training_step("x") == "step(x)"
    interceptor.add(transforms[0])  # the old object still works
    assert strategy.training_step("x") == "a[step(x>a)]"


def test_an_unknown_transform_can_be_removed_without_effect(strategy):
    StepInterceptor.of(strategy).remove(tag("never added"))
    assert untouched(strategy)
    known = tag("a")
    StepInterceptor.of(strategy).add(known)
    StepInterceptor.of(strategy).remove(tag("a"))  # equal name, another function
    assert strategy.training_step("x") == "a[step(x>a)]"
    StepInterceptor.of(strategy).remove(known)
    StepInterceptor.of(strategy).remove(known)
    assert untouched(strategy)


@pytest.mark.parametrize("place", ["transform", "step", "strategy"])
def test_an_exception_leaves_the_module_as_it_was(place):
    class Failing(Module):
        fail = place == "step"

        def training_step(self, batch, *args):
            if self.fail:
                raise ConnectionError("a rank is gone")
            return "fine"

    def fails(next_step, batch, *args):
        if place == "transform":
            raise ConnectionError("a rank is gone")
        return next_step(batch, *args)

    strategy = Wrapping(Failing())
    strategy.fail_before_call = place == "strategy"
    StepInterceptor.of(strategy).add(fails)
    with pytest.raises(ConnectionError):
        strategy.training_step("x")
    assert not set(vars(strategy.lightning_module)) & {"training_step", "forward"}
    StepInterceptor.of(strategy).remove(fails)
    strategy.fail_before_call = strategy.lightning_module.fail = False
    assert strategy.training_step("x") == "fine"


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_that_compilation_left_on_the_instance_stay(fails):
    # torch.compile(module) in place leaves `forward` and `training_step` in the instance
    module = Module()
    compiled_forward = lambda x: x * 3  # noqa: E731
    compiled_step = lambda batch, *args: f"compiled({batch})"  # noqa: E731
    module.forward, module.training_step = compiled_forward, compiled_step
    strategy = Wrapping(module)

    def transform(next_step, batch, *args):
        if fails:
            raise ConnectionError("a rank is gone")
        return f"t[{next_step(batch, *args)}]"

    StepInterceptor.of(strategy).add(transform)
    if fails:
        with pytest.raises(ConnectionError):
            strategy.training_step("x")
    else:
        assert strategy.training_step("x") == "t[compiled(x)]"
    assert vars(module)["forward"] is compiled_forward
    assert vars(module)["training_step"] is compiled_step
    StepInterceptor.of(strategy).remove(transform)
    assert vars(module)["training_step"] is compiled_step


def test_the_module_is_looked_up_at_every_step():
    strategy = Strategy()
    StepInterceptor.of(strategy).add(tag("a"))
    first, strategy.lightning_module = strategy.lightning_module, Module()
    strategy.training_step("x")
    assert first.seen == []
    assert len(strategy.lightning_module.seen) == 1


# --- strangers that wrap the same method


def test_a_wrapper_that_was_there_before_comes_back(strategy):
    original = strategy.training_step
    strategy.training_step = stranger = lambda *args: f"stranger[{original(*args)}]"
    ours = tag("a")
    StepInterceptor.of(strategy).add(ours)
    assert strategy.training_step("x") == "stranger[a[step(x>a)]]"
    StepInterceptor.of(strategy).remove(ours)
    assert vars(strategy)["training_step"] is stranger
    assert strategy.training_step("x") == "stranger[step(x)]"


def test_a_wrapper_that_came_later_is_not_dropped(strategy):
    ours = tag("a")
    StepInterceptor.of(strategy).add(ours)
    wrapped = strategy.training_step
    strategy.training_step = lambda *args: f"stranger[{wrapped(*args)}]"
    assert strategy.training_step("x") == "stranger[a[step(x>a)]]"
    StepInterceptor.of(strategy).remove(ours)
    assert strategy.training_step("x") == "stranger[step(x)]"
    StepInterceptor.of(strategy).add(ours)
    assert strategy.training_step("x") == "stranger[a[step(x>a)]]"


# --- combinations that cannot work


def sharded(name: str) -> Strategy:
    base = type(name, (Strategy,), {})
    return type("MyOwn", (base,), {})()  # a subclass counts too


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_sharded_strategies_are_refused(name):
    for check in (
        lambda: check_module_can_be_called(sharded(name), "TheOption"),
        lambda: check_step_can_be_intercepted(sharded(name), Module(), needs_second_pass=False, option="TheOption"),
    ):
        with pytest.raises(UsageError, match=f"^TheOption.*{name}.*strategy='ddp'$"):
            check()


def test_the_names_of_sharded_strategies_are_those_of_lightning():
    from robustdist._lightning import PACKAGE
    from robustdist.core import redirect

    strategies = __import__(f"{PACKAGE}.strategies", fromlist=["strategies"])
    assert all(isinstance(getattr(strategies, name), type) for name in redirect._SHARDED)


def test_a_step_that_fetches_its_own_batch_is_refused():
    class Fetching(Module):
        def training_step(self, dataloader_iter):
            return None

    with pytest.raises(UsageError, match=r"^TheOption.*training_step\(self, batch, batch_idx\)"):
        check_step_can_be_intercepted(Strategy(), Fetching(), needs_second_pass=False, option="TheOption")


def test_a_second_pass_needs_automatic_optimisation():
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(UsageError, match=r"^TheOption.*automatic_optimization=True"):
        check_step_can_be_intercepted(Strategy(), module, needs_second_pass=True, option="TheOption")
    check_step_can_be_intercepted(Strategy(), module, needs_second_pass=False, option="TheOption")


def test_ordinary_combinations_pass():
    class NamedLikeOne(Strategy):
        """Not sharded: only its name contains the word."""

    NamedLikeOne.__name__ = "NotFSDPStrategyAtAll"
    for strategy in (Strategy(), Wrapping(), NamedLikeOne()):
        assert check_step_can_be_intercepted(strategy, Module(), needs_second_pass=True, option="o") is None
        assert untouched(strategy)
