"""StructuredPruning in real fits: one process and two, from the first batch to a resumed training."""

import copy
import sys
import warnings
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, TensorDataset

from robustdist.attacks import FGSM
from robustdist.callbacks import AdversarialTraining, LearnerTuning, StructuredPruning
from robustdist.core.testing import toy_images
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.objectives import ConAdv
from robustdist.pruning import PruningRecipe, load_pruned, pruned_loading
from robustdist.strategies.replicas import replica_digest
from tests.unit.pruning.nets import Residual
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, randomised

X = toy_images(8)[0]
SCHEDULE = {"kind": "cubic", "start": 0.1, "end": 0.5, "rounds": 3}
NUM_STEPS = 16


class Module(pl.LightningModule):
    """An ordinary module: nothing of robustdist."""

    def __init__(self, lr=1e-2, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = Residual(width=width, num_classes=4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]


def loader(num_samples=64, batch_size=8, shuffle=False):
    return DataLoader(TensorDataset(*toy_images(num_samples)), batch_size, shuffle=shuffle)


def pruning(**options):
    return StructuredPruning(**{"target": {"width": 0.5}, "schedule": SCHEDULE, "round_to": 1, **options})


def trainer_of(path, callbacks, max_epochs=2, **options):
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, **options}
    return pl.Trainer(
        max_epochs=max_epochs,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **options,
    )


def fitted(path, callbacks, seed=0, ckpt_path=None, data=None, **options):
    pl.seed_everything(seed)
    module = Module()
    trainer = trainer_of(path, callbacks, **options)
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return trainer, module


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


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


def test_files_before_and_after_the_removal(tmp_path, monkeypatch):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer, module = fitted(tmp_path, [pruning(), saved], enable_checkpointing=True)
    masked, small = tmp_path / "step=7.ckpt", tmp_path / "step=16.ckpt"
    plain = Module.load_from_checkpoint(masked)
    assert size(plain) == size(Module())
    assert (plain.net.conv1.weight.abs().sum((1, 2, 3)) == 0).sum() >= 3
    with pytest.raises(UsageError, match=r"holds a pruned model: load it with robustdist.pruning.load_pruned\(Module"):
        Module.load_from_checkpoint(small)
    x = toy_images(8)[0]
    expected = module.eval()(x)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch_pruning", None)  # as where it is not installed
        assert torch.equal(load_pruned(Module, small).eval()(x), expected)
    with pruned_loading():
        assert torch.equal(Module.load_from_checkpoint(small).eval()(x), expected)
    content = torch.load(small, weights_only=True)
    recipe = PruningRecipe.from_dict(content["robustdist.pruning"])
    assert recipe == module.pruning_recipe
    assert recipe.provenance["method"] == "taylor"
    fresh = Module()
    trainer_of(tmp_path, [pruning()]).validate(fresh, loader(), ckpt_path=small, verbose=False)
    assert torch.equal(fresh.eval()(x), expected)
    with pytest.raises(UsageError, match="build a fresh Module"):
        trainer.validate(module, loader(), ckpt_path=masked, verbose=False)


@pytest.mark.parametrize("step", [2, 6, 8, 12])
@pytest.mark.parametrize(
    "options", [{"distill": 0.5}, {"method": "l0"}, {"method": "hydra"}], ids=["distilled", "l0", "hydra"]
)
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, step, options):
    """Broken off while scores are gathered, while units are masked, right after the removal, while tuning."""
    # Lightning resumes at the end of an epoch: of two steps here
    settings = {"data": loader(16), "max_epochs": NUM_STEPS // 2}
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    callbacks = [pruning(**options), EMAWeightAveraging(decay=0.9), saved]
    _, whole = fitted(tmp_path, callbacks, enable_checkpointing=True, **settings)
    callbacks = [pruning(**options), EMAWeightAveraging(decay=0.9)]
    _, resumed = fitted(tmp_path, callbacks, seed=5, ckpt_path=tmp_path / f"step={step}.ckpt", **settings)
    assert resumed.pruning_recipe == whole.pruning_recipe
    assert replica_digest(resumed) == replica_digest(whole)


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


class Unused(Module):
    """A branch that takes no part in training."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(3, 3)


class Digests(Callback):
    def __init__(self):
        self.digests = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        everybody = trainer.strategy.all_gather(torch.tensor(replica_digest_of_parameters(pl_module)))
        self.digests.append(len(set(everybody.tolist())))

    def on_train_end(self, trainer, pl_module):
        assert len(self.digests) == len(trainer.train_dataloader) * trainer.max_epochs
        assert set(self.digests) == {1}, self.digests


def replica_digest_of_parameters(module):
    spare = copy.deepcopy(module)
    for buffer in spare.buffers():
        buffer.zero_()  # statistics of batch norms are those of a rank's own data
    return replica_digest(spare)


@pytest.mark.parametrize("method", ["taylor", "bn_scale", "l0", "hydra"])
def test_ranks_with_other_data_stay_equal(tmp_path, method):
    pl.seed_everything(0)
    callbacks = [pruning(method=method, ignore=["net.grouped"] if method == "bn_scale" else []), Digests()]
    trainer = trainer_of(tmp_path, callbacks, devices=2, strategy="robust_ddp_fork", max_epochs=3)
    module = Module()
    trainer.fit(module, loader(160))
    # the main process of a forked training gets the small module too
    assert size(module) < 0.6 * size(Module())
    assert module.pruning_recipe.hash()


@pytest.mark.parametrize("compressor", ["QSGD", "Sign", "TopK", "PowerSGD", "EF21"])
def test_compressed_communication_goes_on(tmp_path, compressor):
    from robustdist import comm
    from robustdist.strategies import CompressedDDPStrategy

    options = {"TopK": {"ratio": 0.1}, "QSGD": {"bits": 4}, "EF21": {"base": comm.TopK(ratio=0.1)}}
    codec = getattr(comm, compressor)(**options.get(compressor, {}))
    strategy = CompressedDDPStrategy(compressor=codec, sides=2, start_method="fork")
    pl.seed_everything(0)
    module = Module(width=16)
    trainer = trainer_of(tmp_path, [pruning(), Digests()], devices=2, strategy=strategy, max_epochs=3)
    trainer.fit(module, loader(96))
    assert size(module) < 0.4 * size(Module(width=16))


@pytest.mark.parametrize("kind", [{"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_ddp_options(tmp_path, kind):
    from robustdist.strategies import RobustDDPStrategy

    pl.seed_everything(0)
    module = Unused() if "find_unused_parameters" in kind else Module()
    strategy = RobustDDPStrategy(start_method="fork", **kind)
    trainer = trainer_of(tmp_path, [pruning(), Digests()], devices=2, strategy=strategy, accumulate_grad_batches=2)
    trainer.fit(module, loader(64))
    assert size(module) < 0.5 * size(Module())


@pytest.mark.parametrize("step", [2, 6, 12])
def test_two_ranks_resume(tmp_path, step):
    def run(callbacks, ckpt_path=None):
        pl.seed_everything(0)
        module = Module()
        options = {"devices": 2, "strategy": "robust_ddp_fork", "enable_checkpointing": True}
        trainer = trainer_of(tmp_path, [pruning(), *callbacks], max_epochs=NUM_STEPS // 2, **options)
        trainer.fit(module, loader(32), ckpt_path=ckpt_path)
        return module

    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    whole = run([saved])
    resumed = run([ModelCheckpoint(dirpath=tmp_path / "again")], tmp_path / f"step={step}.ckpt")
    assert replica_digest(resumed) == replica_digest(whole)


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


def test_training_that_ends_before_the_schedule_says_so(tmp_path):
    with pytest.warns(RobustDistWarning, match="training ended before schedule.end"):
        _, module = fitted(tmp_path, [pruning(schedule={"start": 0.9}), Stop()])
    assert size(module) < 0.4 * size(Module())


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step > 4


def test_another_target_in_a_resumed_training_is_told(tmp_path):
    trainer, _ = fitted(tmp_path, [pruning()], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    with pytest.warns(RobustDistWarning, match="a removal that is done stays as it is"):
        fitted(tmp_path, [pruning(target={"width": 0.25})], ckpt_path=tmp_path / "small.ckpt")


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


def test_files_of_weights_alone_and_files_after_the_fit_have_the_recipe(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_weights_only=True)
    trainer, module = fitted(tmp_path, [pruning(), saved], enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    for name in ("step=16.ckpt", "after.ckpt"):
        assert replica_digest(load_pruned(Module, tmp_path / name)) == replica_digest(module)


@pytest.mark.parametrize("further", [[], [pruning()]], ids=["tuned", "pruned again"])
def test_a_pruned_module_is_trained_on_and_loads_again(tmp_path, further):
    trainer, first = fitted(tmp_path, [pruning()])
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    module = load_pruned(Module, tmp_path / "first.ckpt")
    trainer = trainer_of(tmp_path, further)
    trainer.fit(module, loader())
    assert (size(module) < size(first)) == bool(further)
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    assert torch.equal(load_pruned(Module, tmp_path / "second.ckpt").eval()(X), module.eval()(X))


@pytest.mark.slow
def test_the_main_process_follows_a_second_pruning(tmp_path):
    module = Module()
    for _ in range(2):
        before = size(module)
        trainer_of(tmp_path, [pruning()], devices=2, strategy="robust_ddp_fork").fit(module, loader(96))
        assert size(module) < 0.6 * before
    fresh = Module()
    module.pruning_recipe.apply(fresh)
    fresh.load_state_dict(module.state_dict())


@pytest.mark.parametrize("at", [4, 12])
def test_a_file_written_for_an_exception_is_as_good_as_any(tmp_path, at):
    """By a callback that comes after ours: while units are masked, and while norms are averaged anew."""

    class Stop(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.global_step == at:
                raise KeyboardInterrupt

    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    callbacks = [pruning(distill=0.5), Stop(), saved, OnExceptionCheckpoint(tmp_path, "stopped")]
    with pytest.raises(SystemExit):
        fitted(tmp_path, callbacks, data=loader(16), max_epochs=NUM_STEPS // 2, enable_checkpointing=True)
    expected, found = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["callbacks"]["StructuredPruning"]
        for name in (f"step={at}", "stopped")
    )
    teachers = expected.pop("teacher"), found.pop("teacher")
    assert teachers[0].keys() == teachers[1].keys()
    assert all(map(torch.equal, teachers[0].values(), teachers[1].values()))
    sums = expected["criterion"].pop("sums"), found["criterion"].pop("sums")
    assert all(map(torch.equal, sums[0].values(), sums[1].values()))
    assert found == expected
    assert bool(found["recalibration"]["left"]) == (at == 12)


def test_a_copy_made_in_the_fit_loads_pruned_files(tmp_path):
    class Copies(Callback):
        def on_train_start(self, trainer, pl_module):
            self.copy = copy.deepcopy(pl_module)

    copies = Copies()
    trainer, module = fitted(tmp_path, [pruning(), copies])
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    trainer.validate(copies.copy, loader(), ckpt_path=tmp_path / "small.ckpt", verbose=False)
    assert replica_digest(copies.copy) == replica_digest(module)


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
