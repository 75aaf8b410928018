"""Combinations that cannot work are refused in one sentence, before anything is trained."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT, PGDAT, FastBAT, GradAlign

from .support import Classifier, Quiet, loader, make_trainer, shares


class FSDPStrategy(SingleDeviceStrategy):
    """Has the name of Lightning's, which needs a GPU."""


class ModelParallelStrategy(SingleDeviceStrategy):
    """The same for tensor parallelism."""


class DeepSpeedStrategy(SingleDeviceStrategy):
    """The same for DeepSpeed."""


class Derived(FSDPStrategy):
    """Somebody's subclass."""


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (FSDPStrategy, "FSDPStrategy"),
        (ModelParallelStrategy, "ModelParallelStrategy"),
        (DeepSpeedStrategy, "DeepSpeedStrategy"),
        (Derived, "FSDPStrategy"),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_sharded_strategies_are_refused(tmp_path, images, strategy, name, verb):
    module = Classifier()
    callback = AdversarialTraining() if verb == "fit" else RobustEvaluation()
    trainer = make_trainer(
        strategy=strategy(device=torch.device("cpu")), callbacks=[callback], default_root_dir=tmp_path
    )
    with pytest.raises(UsageError, match=rf"{type(callback).__name__}.*{name}.*strategy='ddp'"):
        getattr(trainer, verb)(module, loader(*images(8)))
    assert module.seen == []
    assert not {"training_step", "_robustdist_interceptor"} & set(vars(trainer.strategy))
    assert trainer.validate_loop.inference_mode is trainer.test_loop.inference_mode is True


def test_a_sharded_strategy_is_no_matter_to_predict(tmp_path, images):
    x, _ = images(8)
    trainer = make_trainer(
        strategy=FSDPStrategy(device=torch.device("cpu")),
        callbacks=[AdversarialTraining(), RobustEvaluation()],
        default_root_dir=tmp_path,
    )
    (logits,) = trainer.predict(Classifier(), torch.utils.data.DataLoader(x, batch_size=8))
    assert logits.shape == (8, 4)


def test_subclasses_of_ddp_are_welcome(launch, images):
    class Compressed(DDPStrategy):
        pass

    x, y = images(16)
    ranks = launch(
        Classifier(),
        loader(x, y, batch_size=4),
        processes=2,
        strategy=Compressed(start_method="fork"),
        callbacks=[AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=1))],
        collect=lambda trainer, module: len(module.seen),
    )
    assert ranks == [4, 4]


class Fetching(Classifier):
    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.parametrize("objective", [PGDAT(), DAT(1.0)])
def test_steps_that_fetch_their_batch_are_refused(tmp_path, images, objective):
    module = Fetching()
    trainer = make_trainer(callbacks=[AdversarialTraining(objective)], default_root_dir=tmp_path)
    with pytest.raises(UsageError, match=r"dataloader_iter.*training_step\(self, batch, batch_idx\)"):
        trainer.fit(module, loader(*images(8)))
    assert module.seen == []


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("attack_precision", ["32", "bf16"])
def test_an_attack_in_another_type_than_the_weights_is_refused(tmp_path, images, precision, attack_precision):
    module = Classifier()
    callback = AdversarialTraining(precision=attack_precision)
    trainer = make_trainer(callbacks=[callback], precision=precision, default_root_dir=tmp_path)
    with pytest.raises(UsageError, match=rf"{attack_precision}.*{precision}.*inherit"):
        trainer.fit(module, loader(*images(8)))
    assert module.seen == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_both_processes_end_when_the_images_of_one_do_not_fit(tmp_path, images, verb, bad_rank):
    x, y = images(8)
    x[bad_rank] = 200.0  # in the first batch of this process alone

    class Unshuffled(Classifier):
        def train_dataloader(self):
            return shares(x, y, 1)

    attack = PGD(eps=0.1, steps=1)
    module = Unshuffled()
    callback = AdversarialTraining(attack=attack) if verb == "fit" else RobustEvaluation({"pgd": attack})
    trainer = make_trainer(2, callbacks=[callback], use_distributed_sampler=verb != "fit", default_root_dir=tmp_path)
    with pytest.raises(
        torch.multiprocessing.ProcessRaisedException, match=rf"UsageError.*200.*bounds.*process {bad_rank}"
    ):
        getattr(trainer, verb)(module, *([] if verb == "fit" else [loader(x, y, batch_size=1)]))


@pytest.mark.parametrize("objective", [FastBAT(), GradAlign(), AWP(FastBAT())], ids=repr)
@pytest.mark.parametrize("whole", [True, False])
def test_objectives_that_differentiate_twice_refuse_compiled_modules(launch, images, objective, whole):
    module = Quiet()
    if whole:
        module = torch.compile(module, backend="aot_eager")
    else:
        module.net.conv = torch.compile(module.net.conv, backend="aot_eager")
    with pytest.raises(UsageError, match="differentiates twice, but") as caught:
        launch(module, loader(*images(8)), callbacks=[AdversarialTraining(objective)])
    assert "\n" not in str(caught.value)
    name = "the module" if whole else "its part 'net.conv'"
    assert name in str(caught.value)


def test_fast_bat_without_its_implicit_part_takes_a_compiled_module(launch, images):
    module = Quiet()
    module.net.conv = torch.compile(module.net.conv, backend="aot_eager")
    before = module.net.head.weight.detach().clone()
    launch(module, loader(*images(8)), callbacks=[AdversarialTraining(FastBAT(implicit_weight=0.0))])
    assert not torch.equal(module.net.head.weight, before)
