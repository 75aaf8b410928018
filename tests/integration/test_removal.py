"""What is left behind: nothing, however the training ends."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.core.redirect import StepInterceptor
from robustdist.errors import UsageError
from robustdist.objectives import DAT, PGDAT

from .support import Classifier, identical, loader, make_trainer, seeded_net

OURS = {"training_step", "forward", "log", "log_dict"}


class Failing(Classifier):
    """Fails at a place of choice in its third step."""

    def __init__(self, place, error=RuntimeError):
        super().__init__(seeded_net(batch_norm=True, dropout=0.5))
        self.net.norm.eval()  # frozen by the user
        self.place = place
        self.error = error
        self.step = 0

    def forward(self, x):
        if self.place == "attack" and self.step == 2 and x.requires_grad:
            raise self.error("in the attack")
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        if self.place == "step" and batch_idx == 2:
            raise self.error("in the step")
        loss = super().training_step(batch, batch_idx)
        if self.place == "second pass" and batch_idx == 2 and len(self.seen) % 2 == 0:
            raise self.error("in the second pass")
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.step = batch_idx


def remains(trainer, module):
    """Return whatever differs from a module and a strategy that never met us."""
    found = {f"module.{name}" for name in OURS & set(vars(module))}
    found |= {f"net.{name}" for name in OURS & set(vars(module.net))}
    found |= {f"strategy.{name}" for name in vars(trainer.strategy) if name == "training_step" or "robustdist" in name}
    found |= {"hook" for optimizer in trainer.optimizers if optimizer._optimizer_step_post_hooks}
    found |= {"requires_grad" for parameter in module.parameters() if not parameter.requires_grad}
    return found


def flags(module):
    return {name: part.training for name, part in module.named_modules()}


@pytest.mark.parametrize(
    ("place", "error", "caught"),
    [
        (None, RuntimeError, None),
        ("step", RuntimeError, RuntimeError),
        ("second pass", RuntimeError, RuntimeError),
        ("attack", RuntimeError, RuntimeError),
        ("attack", KeyboardInterrupt, SystemExit),
    ],
)
def test_strategy_and_module_are_their_own_again(tmp_path, images, place, error, caught):
    x, y = images(32)
    module = Failing(place, error)
    before = flags(module)
    attack = PGD(eps=0.1, steps=2)
    callbacks = [AdversarialTraining(DAT(1.0), attack), RobustEvaluation({"pgd": attack})]
    trainer = make_trainer(callbacks=callbacks, default_root_dir=tmp_path)
    if caught is None:
        trainer.fit(module, loader(x, y), loader(x, y))
    else:
        with pytest.raises(caught):
            trainer.fit(module, loader(x, y), loader(x, y))
        assert len(module.seen) == {"second pass": 6}.get(place, 4)

    assert remains(trainer, module) == set()
    assert flags(module) == before
    assert module.training_step.__func__ is Failing.training_step
    assert trainer.strategy.training_step.__func__ is type(trainer.strategy).training_step
    # an ordinary training afterwards is an ordinary training
    module.place, module.seen = None, []
    make_trainer(default_root_dir=tmp_path).fit(module, loader(x, y))
    assert torch.equal(torch.cat(module.seen), x)


@pytest.mark.parametrize("place", ["attack", "step"])
def test_a_failure_in_two_processes_reaches_the_one_that_started_them(tmp_path, images, place):
    x, y = images(32)
    module = Failing(place)
    before = flags(module)
    trainer = make_trainer(
        2, callbacks=[AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=2))], default_root_dir=tmp_path
    )
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=f"in the {place}"):
        trainer.fit(module, loader(x, y, batch_size=4))
    assert remains(trainer, module) == set()
    assert flags(module) == before
    module.place = None
    make_trainer(default_root_dir=tmp_path).fit(module, loader(x, y))
    assert torch.equal(torch.cat(module.seen), x)


class Adding(pl.Callback):
    """A step transform of somebody else."""

    def __init__(self, name, order, trace, leave_after=None):
        self.name, self.order, self.trace, self.leave_after = name, order, trace, leave_after

    def setup(self, trainer, pl_module, stage):
        StepInterceptor.of(trainer.strategy).add(self.transform, self.order)

    def transform(self, next_step, batch, *args):
        self.trace.append(f"{self.name}:in")
        output = next_step(batch, *args)
        self.trace.append(f"{self.name}:out")
        return output

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.leave_after:
            StepInterceptor.of(trainer.strategy).remove(self.transform)

    def teardown(self, trainer, pl_module, stage):
        StepInterceptor.of(trainer.strategy).remove(self.transform)


class Traced(Classifier):
    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def training_step(self, batch, batch_idx):
        self.trace.append("step")
        return super().training_step(batch, batch_idx)


def test_two_transforms_keep_their_order_and_leave_one_by_one(tmp_path, images):
    x, y = images(24)
    trace = []
    adversarial = AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=1), order=0)
    # handed over in the opposite order
    inner, outer = Adding("inner", 5, trace, leave_after=1), Adding("outer", -5, trace)
    module = Traced(trace)
    trainer = make_trainer(callbacks=[inner, adversarial, outer], default_root_dir=tmp_path)
    trainer.fit(module, loader(x, y))

    once = ["inner:in", "step", "inner:out"]
    assert trace == 2 * ["outer:in", *once, *once, "outer:out"] + ["outer:in", "step", "step", "outer:out"]
    assert remains(trainer, module) == set()
    # the outer one saw clean images, the step adversarial ones, then clean ones
    assert not torch.equal(torch.cat(module.seen[::2]), x)
    assert torch.equal(torch.cat(module.seen[1::2]), x)


def test_a_wrapper_of_somebody_else_stays(tmp_path, images):
    x, y = images(24)
    calls = []
    trainer = make_trainer(callbacks=[AdversarialTraining(attack=PGD(eps=0.1, steps=1))], default_root_dir=tmp_path)
    own = trainer.strategy.training_step

    def theirs(*args):
        calls.append(1)
        return own(*args)

    trainer.strategy.training_step = theirs
    module = Classifier()
    trainer.fit(module, loader(x, y))
    assert len(calls) == 3
    assert trainer.strategy.training_step is theirs
    assert remains(trainer, module) == {"strategy.training_step"}
    assert not torch.equal(torch.cat(module.seen), x)


class Quasi(Classifier):
    """Trains with an optimiser that runs the step several times per batch."""

    def __init__(self, net=None):
        super().__init__(net)
        self.batches: list[int] = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


def test_a_closure_that_runs_again_attacks_the_weights_of_the_moment(tmp_path, images):
    from .support import EPS, STEP_SIZE, naive_pgd

    x, y = images(24)
    net = seeded_net()
    attack = PGD(eps=EPS, step_size=STEP_SIZE, steps=3, random_start=False)
    callback = AdversarialTraining(PGDAT(), attack)
    module = Quasi(seeded_net())
    trainer = make_trainer(callbacks=[callback], default_root_dir=tmp_path)
    trainer.fit(module, loader(x, y))

    # the same closure in plain torch
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
    expected = []
    for rows in (slice(0, 8), slice(8, 16), slice(16, 24)):

        def closure(rows=rows):
            x_adv = naive_pgd(net, x[rows], y[rows], EPS, STEP_SIZE, 3)
            expected.append(x_adv)
            loss = F.cross_entropy(net(x_adv), y[rows])
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)

    assert len(module.batches) > 6
    assert len(module.seen) == len(expected)
    assert torch.equal(torch.stack(module.seen), torch.stack(expected))
    assert not torch.equal(module.seen[0], module.seen[1])
    assert identical(module.net.state_dict(), net.state_dict())
    assert callback.state_dict()["num_steps"] == 3
    assert remains(trainer, module) == set()


class Stream(torch.utils.data.IterableDataset):
    """Has no length."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        return iter(zip(*self.tensors, strict=True))


@pytest.mark.parametrize(
    "options", [{"max_epochs": -1}, {"max_epochs": 2}, {"max_epochs": None, "max_time": "00:01:00:00"}]
)
def test_a_ramp_over_a_training_without_length_is_refused(tmp_path, images, options):
    data = DataLoader(Stream(*images(16)), batch_size=8)
    module = Classifier()
    callback = AdversarialTraining(attack=PGD(eps=0.1, steps=1), eps_schedule=LinearRamp(0.5))
    trainer = make_trainer(callbacks=[callback], default_root_dir=tmp_path, **options)
    with pytest.raises(UsageError, match="max_steps"):
        trainer.fit(module, data)
    assert remains(trainer, module) == set()
    assert module.seen == []


@pytest.mark.parametrize("options", [{"max_epochs": -1, "max_steps": 4}, {"max_epochs": 2, "limit_train_batches": 2}])
def test_a_ramp_over_a_stream_of_known_length(launch, images, options):
    eps = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            eps.append(float(trainer.callback_metrics["robust/eps"]))

    callback = AdversarialTraining(attack=PGD(eps=0.1, steps=1), eps_schedule=LinearRamp(1.0))
    launch(Classifier(), DataLoader(Stream(*images(16)), batch_size=8), callbacks=[callback, Watch()], **options)
    assert eps == pytest.approx([0.025, 0.05, 0.075, 0.1])
