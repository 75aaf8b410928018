"""What StructuredPruning refuses or warns about."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    StochasticWeightAveraging,
)

from robustdist.callbacks import LearnerTuning
from robustdist.errors import RobustDistWarning, UsageError
from tests.integration.pruning_support import Module, Stop, fitted, loader, pruning, size, trainer_of


@pytest.mark.parametrize(
    ("options", "fit", "message"),
    [
        ({}, {"strategy": "ddp_fork", "devices": 2}, "use strategy='robust_ddp_fork', 'robust_ddp_spawn' or"),
        ({"target": {"macs": 0.001}}, {}, r"target macs=0.001 cannot be reached.*is left"),
        ({"kinds": ["heads"]}, {}, r"add to kinds=\[.heads.\]"),
        ({"ignore": ["fc"]}, {}, "ignore='fc' matches no group: they are net.stem.0, net.conv1, net.grouped"),
        ({"method": "bn_scale"}, {}, "group net.grouped has no batch norm"),
        ({}, {"max_epochs": -1, "max_steps": -1, "limit_train_batches": 1}, "needs the length of training"),
    ],
)
def test_what_cannot_be_done_is_said_before_training(tmp_path, options, fit, message):
    # a forked process hands on the text of its error
    with pytest.raises(Exception, match=message):
        fitted(tmp_path, [pruning(**options)], **fit)


def test_training_that_ends_before_the_schedule_says_so(tmp_path):
    with pytest.warns(RobustDistWarning, match="training ended before schedule.end"):
        _, module = fitted(tmp_path, [pruning(schedule={"start": 0.9}), Stop()])
    assert size(module) < 0.4 * size(Module())


def test_no_warning_of_a_size_that_is_only_tried(tmp_path):
    """Before there are scores, whether the target can be reached is tried with none; the fit comes closer to it."""
    pl.seed_everything(0)
    module = Module()
    module.net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(576, 4),
    )
    dense = size(module)
    callback = pruning(target={"macs": 0.5}, round_to=8, schedule={"start": 0.2})
    trainer_of(tmp_path, [callback], max_epochs=1).fit(module, loader(32))  # warnings of ours are errors here
    assert size(module) < dense


def test_lbfgs_is_refused(tmp_path):
    class Other(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UsageError, match="LBFGS remembers one vector"):
        trainer_of(tmp_path, [pruning()]).fit(Other(), loader())


def test_learners_are_another_fit(tmp_path):
    with pytest.raises(UsageError, match="prune first, load the small module"):
        fitted(tmp_path, [pruning(), LearnerTuning(rank=2, priming_epochs=0)])


def test_an_average_that_cannot_follow_is_refused(tmp_path):
    with pytest.raises(UsageError, match="use EMAWeightAveraging, or removal='never'"):
        fitted(tmp_path, [pruning(), StochasticWeightAveraging(1e-2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": {"macs": 0}}, "target macs=0 is out of range"),
        ({"target": 0.5}, "target=0.5 must be a mapping"),
        ({"schedule": "cubic"}, "schedule='cubic' must be a mapping"),
        ({"kinds": "channels"}, r"kinds='channels' must be a list: write \['channels'\]"),
        ({"ignore": "fc"}, "ignore='fc' must be a list"),
        ({"target": {"macs": 0.5, "params": 0.5}}, "give one of"),
        ({"method": "magic"}, "method='magic' is unknown"),
        ({"schedule": {"end": 0.5, "begin": 0.1}}, "schedule has no option 'begin'"),
        ({"schedule": {"kind": "cubic", "start": 0.7}}, "schedule.end=0.6 is out of range"),
        ({"removal": "later"}, "removal='later' is unknown"),
        ({"kinds": ["neurons"]}, "give some of channels, heads, ffn, hidden"),
        ({"distill": 2.0}, "distill=2.0 is out of range"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UsageError, match=message):
        pruning(**options)
