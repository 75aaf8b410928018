"""StructuredPruning of whole layers, in real fits of one and two processes."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from robustdist.callbacks.pruning.plan import plan_of
from robustdist.comm import TopK
from robustdist.errors import UsageError
from robustdist.pruning import load_pruned
from robustdist.report.pruning import plan_tables, wide_console
from robustdist.strategies import CompressedDDPStrategy
from robustdist.strategies.replicas import replica_digest
from tests.integration.pruning_support import Module, loader, pruning, size, trainer_of
from tests.integration.test_pruning_ranks import Digests
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, randomised

IDS = torch.randint(20, (64, 7), generator=torch.Generator().manual_seed(0))
TARGET = {"layers": 2, "heads": 2, "ffn": 12}


class Deep(Module):
    def __init__(self, lr=1e-3, count=4):
        super().__init__(lr)
        self.net = randomised(HomeMadeModel([Block(HomeMade()) for _ in range(count)])).train()


def words(num_samples=64, batch_size=8):
    return DataLoader(TensorDataset(IDS[:num_samples], IDS[:num_samples, 0] % 5), batch_size)


def layers(**options):
    return pruning(**{"target": TARGET, "report": False, **options})


def fitted(path, callbacks, data=None, ckpt_path=None, **options):
    pl.seed_everything(0)
    module = Deep()
    trainer = trainer_of(path, callbacks, **options)
    trainer.fit(module, data or words(), ckpt_path=ckpt_path)
    assert not any(part._forward_hooks for part in module.modules())  # no mask and no gate stays
    return module


class Watch(Callback):
    """Derivatives by multipliers on the layers, with a forward pass of its own; the module at the end of training."""

    def __init__(self):
        self.squares = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        net = copy.deepcopy(pl_module.net)
        for block in net.blocks:
            block._forward_hooks.clear()
        g = torch.ones(len(net.blocks), dtype=next(net.parameters()).dtype, requires_grad=True)
        x = net.embedding(batch[0])
        for block, value in zip(net.blocks, g, strict=True):
            x = x + value * (block(x) - x)
        loss = torch.nn.functional.cross_entropy(net.head(x.mean(1)), batch[1])
        of_ranks = trainer.strategy.all_gather(torch.autograd.grad(loss, g)[0].double())
        self.squares.append(of_ranks.reshape(-1, len(g)).mean(0) ** 2)

    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            self.outputs = copy.deepcopy(pl_module).eval()(IDS)


class Scores(Watch):
    """Expects that the layers with the smallest mean squares over the first quarter are gone."""

    def on_train_end(self, trainer, pl_module):
        scores = torch.stack(self.squares[: trainer.global_step // 4]).mean(0)
        expected = [f"net.blocks.{unit}" for unit in sorted(scores.argsort()[:2].tolist())]
        assert list(pl_module.pruning_recipe.dropped_layers) == expected
        criterion = trainer.callbacks[-1].criterion
        torch.testing.assert_close(criterion.sums["net.blocks"] / criterion.steps, scores)


def test_the_layers_with_the_least_derivatives_go(tmp_path):
    callback = layers(target={"layers": 2}, schedule={"start": 0.25})
    assert callback.kinds == ("layers",)
    module = fitted(tmp_path, [Scores(), callback], precision="64-true")
    assert size(module) == size(Deep()) - 2 * size(Deep().net.blocks[0])
    assert module.pruning_recipe.cuts == ()


@pytest.mark.parametrize("method", ["taylor", pytest.param("hydra", marks=pytest.mark.slow)])
def test_the_small_module_trains_as_the_masked_one(tmp_path, method):
    """Removed in the middle of the fit or masked to its end: the same, also for averages and under clipping."""
    options = {"method": method, "schedule": {"start": 0.25, "end": 0.25, "kind": "one_shot"}}
    settings = {"precision": "64-true", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    found = []
    for removal in ("scheduled", "never"):
        callback, watch, average = layers(**options), Watch(), EMAWeightAveraging(decay=0.5)
        callback.removal = removal  # users are refused: such a mask is in no file
        module = fitted(tmp_path, [watch, callback, average], **settings)
        found.append((watch.outputs, size(module)))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-12
    assert found[0][1] < 0.6 * found[1][1] == 0.6 * size(Deep())


SLOW = [("taylor", 2), ("taylor", 8), ("taylor", 12), ("l0", 2), ("l0", 8), ("hydra", 6)]


@pytest.mark.filterwarnings("ignore:method='l0'")  # masks learn little in so few steps
@pytest.mark.parametrize(
    ("method", "step"), [("taylor", 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, method, step):
    """Broken off while scores are gathered, while layers are masked, right after the removal, while tuning."""
    settings = {"data": words(16), "max_epochs": 8, "enable_checkpointing": True}
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    whole = fitted(tmp_path, [layers(method=method), saved], **settings)
    again = ModelCheckpoint(dirpath=tmp_path / "again")
    resumed = fitted(tmp_path, [layers(method=method), again], ckpt_path=tmp_path / f"step={step}.ckpt", **settings)
    assert replica_digest(resumed) == replica_digest(whole)
    assert resumed.pruning_recipe == whole.pruning_recipe
    assert len(whole.pruning_recipe.dropped_layers) == 2
    loaded = load_pruned(Deep, tmp_path / "step=16.ckpt")
    assert torch.equal(loaded.eval()(IDS), whole.eval()(IDS))
    # another fit goes on from there
    trainer_of(tmp_path, [layers(target={"layers": 1})]).fit(loaded, words())
    assert len(loaded.pruning_recipe.dropped_layers) == 3
    fresh = Deep()
    loaded.pruning_recipe.apply(fresh)
    fresh.load_state_dict(loaded.state_dict())


def test_ranks_with_other_data_drop_the_same_layers(tmp_path):
    """By the square of the mean of their derivatives; the weights stay equal."""
    callbacks = [Scores(), Digests(), layers(target={"layers": 2}, schedule={"start": 0.25})]
    options = {"devices": 2, "strategy": "robust_ddp_fork", "precision": "64-true"}
    module = fitted(tmp_path, callbacks, max_epochs=4, **options)
    assert len(module.pruning_recipe.dropped_layers) == 2


@pytest.mark.slow
def test_compressed_communication_goes_on(tmp_path):
    """What is kept of parameters that are gone is forgotten, the rest is cut."""
    codec = CompressedDDPStrategy(compressor=TopK(ratio=0.1), sides=2, start_method="fork")
    module = fitted(tmp_path, [layers(), Digests()], devices=2, strategy=codec, max_epochs=4)
    assert len(module.pruning_recipe.dropped_layers) == 2


def test_tables_of_a_plan_and_of_a_fit(tmp_path, capsys):
    module, callback = (
        Deep(),
        layers(method="magnitude", schedule={"start": 0.0}, report=True, report_dir=str(tmp_path)),
    )
    plan = plan_of(callback, module, next(iter(words())))
    (stack,) = [group for group in plan.groups if group.kind == "layers"]
    assert (stack.size, stack.kept, len(stack.layers)) == (4, 2, 2)
    for group in plan.groups:
        if group.name.startswith(stack.layers):
            assert (group.kept, group.rule) == (0, f"goes with {group.name[: len('net.blocks.0')]}")
    for part in plan_tables(plan.to_dict()):
        wide_console().print(part)
    told = " ".join(capsys.readouterr().out.split())
    assert "net.blocks layers 4 -> 2" in told
    assert all(path in told for path in stack.layers)
    trainer_of(tmp_path, [callback], max_epochs=1).fit(module, words(16))
    assert module.pruning_recipe.dropped_layers == stack.layers
    assert size(module) == plan.small.params
    told = " ".join(capsys.readouterr().out.split())
    assert "4 -> 2 layers" in told
    assert f"layers that are gone: {', '.join(stack.layers)}" in told
    assert f"{plan.dense.params:,} {plan.small.params:,}" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": {"layers": 0}}, "target layers=0 would leave no layer"),
        ({"target": {"layers": 2.5}}, "layers=2.5 must be a whole number"),
        ({"target": {"layers": 2}, "method": "bn_scale"}, "no score for target layers: use one of magnitude, taylor"),
        ({"target": {"layers": 2}, "removal": "never"}, "removal='never' does not go with target layers"),
        ({"target": {"macs": 0.5}, "kinds": ["heads", "layers"]}, "layers go by their number"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UsageError, match=message):
        pruning(**options)


@pytest.mark.parametrize(
    ("module", "target", "message"),
    [
        (Deep, {"layers": 9}, "target layers=9 does not fit group net.blocks, which can have 1 to 4"),
        (Module, {"layers": 1}, "Module has no layers that can go.*ask for width, params or macs"),
    ],
)
def test_what_cannot_be_done_is_said_before_training(tmp_path, module, target, message):
    trainer, data = trainer_of(tmp_path, [layers(target=target)]), words() if module is Deep else loader()
    with pytest.raises(UsageError, match=message):
        trainer.fit(module(), data)
