"""StructuredPruning in real fits of one process: masks, removal, learned masks, what follows."""

import copy
import re
import warnings
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
)
from torch.utils.data import DataLoader, TensorDataset

from robustdist.attacks import FGSM
from robustdist.callbacks import AdversarialTraining, StructuredPruning
from robustdist.core.testing import toy_images
from robustdist.errors import RobustDistWarning
from robustdist.objectives import ConAdv
from robustdist.pruning.cost import CostModel
from tests.integration.pruning_support import NUM_STEPS, SCHEDULE, Module, X, fitted, loader, pruning, size, trainer_of
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, randomised


class Watch(Callback):
    """What the optimiser holds after the removal, and whether all of it moves."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if hasattr(pl_module, "pruning_recipe") and not hasattr(self, "at_removal"):
            self.at_removal = copy.deepcopy(list(pl_module.parameters()))
            self.step = trainer.global_step

    def on_train_end(self, trainer, pl_module):
        optimizer = trainer.optimizers[0]
        self.held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.states = [optimizer.state[parameter] for parameter in pl_module.parameters()]


def test_everything_trains_on_after_the_removal(tmp_path):
    watch = Watch()
    _, module = fitted(tmp_path, [pruning(), watch])
    assert size(module) < 0.4 * size(Module())
    assert watch.step == NUM_STEPS // 2
    parameters = list(module.parameters())
    assert watch.held == {id(parameter) for parameter in parameters}
    for before, after, state in zip(watch.at_removal, parameters, watch.states, strict=True):
        assert not torch.equal(before, after)
        assert state["exp_avg"].shape == after.shape
        assert state["step"] == NUM_STEPS


def test_the_small_module_trains_as_the_masked_one(tmp_path):
    """Removal in the middle of the fit or never: the same function at the end, to rounding."""
    options = {"method": "magnitude", "schedule": {"start": 0.25}, "bn_recalibration_batches": 0}
    precision = {"precision": "64-true", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    _, small = fitted(tmp_path, [pruning(**options)], **precision)
    _, masked = fitted(tmp_path, [pruning(removal="never", **options)], **precision)
    assert size(masked) == size(Module())
    x = toy_images(8)[0].double()
    assert (small.eval()(x) - masked.eval()(x)).abs().max() < 1e-10
    small.pruning_recipe.apply(masked)
    assert torch.allclose(masked.eval()(x), small(x), atol=1e-10)


class Words(Module):
    """A transformer: its norms run over the units of the residual stream."""

    def __init__(self):
        super().__init__()
        self.net = randomised(HomeMadeModel([Block(HomeMade()) for _ in range(2)])).train()


@pytest.mark.parametrize(("kinds", "count"), [(["heads", "ffn"], 4), (["hidden"], 1), (["heads", "ffn", "hidden"], 5)])
def test_a_small_transformer_trains_as_the_masked_one(tmp_path, kinds, count):
    ids = torch.randint(20, (32, 7), generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(ids, ids[:, 0] % 5), 8)
    options = {"method": "magnitude", "schedule": {"start": 0.25}, "kinds": kinds}
    trained = []
    for removal in ("scheduled", "never"):
        trained.append(Words())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RobustDistWarning)  # of the norms after the fit
            callback = pruning(removal=removal, **options)
        trainer_of(tmp_path, [callback], precision="64-true").fit(trained[-1], data)
    small, masked = trained
    assert size(masked) == size(Words())
    assert len(small.pruning_recipe.to_dict()["masks"]) >= count
    assert not any(part._forward_hooks for part in masked.modules())
    small.pruning_recipe.apply(masked)
    assert torch.allclose(masked.eval()(ids), small.eval()(ids), atol=1e-10)


def test_other_parts_follow(tmp_path):
    """An average of the weights, past weights of an objective, an attack on every batch, bf16, accumulation."""
    average = EMAWeightAveraging(decay=0.5)
    training = AdversarialTraining(ConAdv(stale=3), FGSM(eps=0.1))
    _, module = fitted(tmp_path, [training, pruning(), average], precision="bf16-mixed", accumulate_grad_batches=2)
    assert size(module) < 0.4 * size(Module())
    assert size(average._average_model.module) == size(module)


def test_masked_units_stay_masked(tmp_path):
    """No schedule to its end: the removal comes at the end of the fit, without another step."""
    _, module = fitted(tmp_path, [pruning(schedule={"kind": "iterative", "start": 0.2, "end": 1.0})])
    assert size(module) < 0.4 * size(Module())


@pytest.mark.filterwarnings("ignore:method='l0'")  # masks learn little in so few steps
@pytest.mark.parametrize("method", ["l0", "hydra"])
def test_learned_masks_meet_exact_widths(tmp_path, method):
    """Every layer at its width, and gates that leave the function of the module as it was when they were fixed."""

    class Judge(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if hasattr(pl_module, "pruning_recipe") and not hasattr(self, "small"):
                self.small = copy.deepcopy(pl_module).eval()(X)

    class Gated(StructuredPruning):
        def _choose(self, trainer, pl_module, way):
            self._learning.before_evaluation()
            spare = copy.deepcopy(pl_module).eval()  # a copy sees the gates, until they end
            self.gated = spare(X).detach()
            super()._choose(trainer, pl_module, way)

    callback = Gated({"channels": 3}, method, schedule=SCHEDULE, bn_recalibration_batches=0)
    judge = Judge()
    _, module = fitted(tmp_path, [callback, judge])
    net = module.net
    assert (net.conv1.out_channels, net.stem[0].out_channels, net.grouped.out_channels) == (3, 6, 6)
    assert torch.allclose(judge.small, callback.gated, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "epochs", "learned"),
    [
        ({"macs": 0.5}, 2, r"0\.0\d+ of macs"),
        ({"params": 0.5}, 2, r"0\.0\d+ of params"),
        ({"width": 0.5}, 2, r"0\.0\d+ of group net\.\w+"),
        ({"macs": 0.5}, 6, r"0\.[89]\d+ of macs"),  # too much, on the way down to the target
        pytest.param({"macs": 0.5}, 16, "", marks=pytest.mark.slow),
    ],
)
def test_a_short_training_of_masks_meets_its_target_and_says_what_was_learned(tmp_path, target, epochs, learned):
    """A share is met by the scores of masks that are far from it, and that is told; near it nothing is said."""
    pl.seed_everything(0)
    module = Module(width=16)
    x = X[:1]
    dense = CostModel(module, [], lambda: module(x)).dense
    callback = pruning(target=target, method="l0", schedule={"kind": "cubic", "start": 0.1, "end": 0.6})
    trainer = trainer_of(tmp_path, [callback], max_epochs=epochs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
    told = [str(warning.message) for warning in caught if issubclass(warning.category, RobustDistWarning)]
    left = CostModel(module, [], lambda: module(x)).dense
    if "width" in target:
        assert module.net.conv1.out_channels == 8
    else:
        (name,) = target
        assert 0.42 < getattr(left, name) / getattr(dense, name) <= 0.5
    assert len(told) == bool(learned)
    assert all(re.search(f"{learned}, 0.5 is wanted.* more steps .* lr .* warmup_steps", text) for text in told), told


def test_weights_wait_while_scores_are_learned(tmp_path):
    class First(Callback):
        def on_train_start(self, trainer, pl_module):
            self.before = copy.deepcopy(list(pl_module.parameters()))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                self.same = all(map(torch.equal, self.before, pl_module.parameters()))

    first = First()
    _, module = fitted(tmp_path, [pruning(method="hydra", schedule={"kind": "cubic", "end": 0.5}), first])
    assert first.same
    assert size(module) < 0.4 * size(Module())


class Overflow(Callback):
    """Gradients that no scaler can save, at some steps."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.fit_loop.total_batch_idx in (0, 5):
            pl_module.net.head.weight.grad.fill_(float("inf"))


def test_a_step_that_the_scaler_skipped_does_not_count(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    callback = pruning(target={"width": 0.5}, schedule={"start": 0.45})
    # 7 of 16 steps are needed; two are skipped
    watch = Watch()
    fitted(tmp_path, [Overflow(), callback, watch], plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert watch.step == 8 + 2
    assert all(bool(torch.isfinite(total).all()) for total in callback.criterion.sums.values())


@pytest.mark.slow
def test_a_latency_is_measured_and_met(tmp_path):
    from robustdist.pruning.latency import forward_times

    dense = Module(width=64)
    images = toy_images(16, size=32)
    x = images[0][:1]
    wanted = 0.8 * forward_times({"dense": dense}, x, batch_sizes=(1,))["dense"][1]
    pl.seed_everything(0)
    module = Module(width=64)
    callback = pruning(target={"latency_ms": wanted}, method="magnitude", schedule={"start": 0.2}, round_to=8)
    trainer_of(tmp_path, [callback], max_epochs=1).fit(module, DataLoader(TensorDataset(*images), 2))
    assert size(module) < size(dense)


class Sentence(NamedTuple):
    ids: torch.Tensor
    label: torch.Tensor


def test_batches_that_are_named_tuples(tmp_path):
    class Named(Words):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch.ids), batch.label)

    ids = torch.randint(20, (32, 7), generator=torch.Generator().manual_seed(0))
    batches = DataLoader([Sentence(part, part[:, 0] % 5) for part in ids.split(8)], batch_size=None)
    module = Named()
    trainer_of(tmp_path, [pruning(kinds=["heads", "ffn"])]).fit(module, batches)
    assert size(module) < 0.9 * size(Named())
