"""StructuredPruning on two ranks: the same units, the same weights, whatever carries the gradients."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
)

from robustdist.strategies.replicas import replica_digest
from tests.integration.pruning_support import NUM_STEPS, Module, loader, pruning, size, trainer_of


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


@pytest.mark.filterwarnings("ignore:method='l0'")  # masks learn little in so few steps
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


@pytest.mark.parametrize(
    ("compressor", "warmup_steps"), [("QSGD", 0), ("Sign", 0), ("TopK", 0), ("PowerSGD", 0), ("EF21", 0), ("Sign", 10)]
)
def test_compressed_communication_goes_on(tmp_path, compressor, warmup_steps):
    from robustdist import comm
    from robustdist.strategies import CompressedDDPStrategy

    options = {"TopK": {"ratio": 0.1}, "QSGD": {"bits": 4}, "EF21": {"base": comm.TopK(ratio=0.1)}}
    codec = getattr(comm, compressor)(**options.get(compressor, {}))
    strategy = CompressedDDPStrategy(compressor=codec, sides=2, warmup_steps=warmup_steps, start_method="fork")
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
