"""The evaluation in fit, validate and test leaves everything as it found it."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from robustdist.attacks import PGD
from robustdist.callbacks import RobustEvaluation

from .evaluation_support import numbers
from .support import Classifier, identical, loader, make_trainer, run, seeded_net, trained_net


class Caching(Classifier):
    """Keeps tensors of its last forward and uses them in the next one."""

    def __init__(self, net):
        super().__init__(net)
        self.last = None
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.ones(x.shape[1:])
        if self.last is not None:
            x = x * self.scale + 0.0 * self.last["x"].mean()
        self.last = {"x": x.detach() * self.scale, "none": None}
        self.table = (x * self.scale).sum(0)
        return self.net(x)


class Interrupt(pl.Callback):
    """Fails in the second batch."""

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            raise RuntimeError("stop here")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_module_that_caches_tensors_is_attacked_in_every_stage(launch, images, processes):
    x, y = images(16)
    net = trained_net()

    def collect(trainer, module):
        result = trainer.callbacks[0].result
        return result.num_clean, result.num_robust, result.checks["gradient"].passed

    outcomes = set()
    for verb in ("fit", "validate", "test"):
        evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=3)})
        loaders = (loader(x, y, batch_size=4),) * (2 if verb == "fit" else 1)
        module = Caching(net)
        module.lr = 0.0
        outcomes.update(
            launch(module, *loaders, verb=verb, processes=processes, callbacks=[evaluation], collect=collect)
        )
    assert len(outcomes) == 1
    num_clean, num_robust, followed = outcomes.pop()
    assert num_robust < num_clean
    assert followed


def test_one_trainer_goes_through_all_stages(tmp_path, images):
    x, y = images(16)
    module = Caching(trained_net())
    evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=3)})
    trainer = make_trainer(callbacks=[evaluation], default_root_dir=tmp_path)
    results = []
    for verb in ("validate", "test", "fit", "validate", "test"):
        data = loader(x, y, batch_size=4)
        getattr(trainer, verb)(module, *([data, data] if verb == "fit" else [data]))
        results.append(evaluation.result)
        assert trainer.validate_loop.inference_mode is trainer.test_loop.inference_mode is True
    assert all(result.num_samples == 16 for result in results)
    assert results[0].num_robust == results[1].num_robust < results[0].num_clean
    assert results[2].num_robust == results[3].num_robust == results[4].num_robust


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode_comes_back_after_an_exception(tmp_path, images, inference_mode):
    x, y = images(16)
    evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=1)})
    trainer = make_trainer(
        callbacks=[evaluation, Interrupt()], default_root_dir=tmp_path, inference_mode=inference_mode
    )
    modes = []

    class Watching(Classifier):
        def validation_step(self, batch, batch_idx):
            modes.append(torch.is_inference_mode_enabled())

    with pytest.raises(RuntimeError, match="stop here"):
        trainer.validate(Watching(), loader(x, y, batch_size=4))
    assert modes == [False, False]
    assert trainer.validate_loop.inference_mode is inference_mode
    assert trainer.test_loop.inference_mode is inference_mode


def test_the_module_is_as_before(tmp_path, images):
    x, y = images(16)
    module = Classifier(seeded_net(batch_norm=True, dropout=0.5))
    module.net.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [part.training for part in module.modules()]
    run(
        tmp_path,
        module,
        loader(x, y, batch_size=4),
        verb="validate",
        callbacks=[RobustEvaluation({"pgd": PGD(eps=0.1, steps=3, model_mode="train")})],
    )
    assert identical(before, module.state_dict())
    assert [part.training for part in module.modules()] == flags
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_may_take_its_batch_apart(launch, images, processes):
    x, y = images(8)
    samples = [{"image": image, "label": label} for image, label in zip(x, y, strict=True)]

    class Destructive(Classifier):
        def validation_step(self, batch, batch_idx):
            batch.pop("label")
            batch.pop("image").sub_(3.0)

    def measure(module):
        evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=3)})
        return launch(
            module,
            DataLoader(samples, batch_size=3, sampler=SequentialSampler(samples)),
            verb="validate",
            processes=processes,
            callbacks=[evaluation],
            collect=numbers,
        )

    class Harmless(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    assert measure(Destructive()) == measure(Harmless())


def test_a_trial_run_leaves_the_report_alone(tmp_path, images):
    def judge(**options):
        evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=2)}, report_dir=str(tmp_path / "report"))
        trainer = make_trainer(callbacks=[evaluation], default_root_dir=tmp_path, **options)
        trainer.test(Classifier(trained_net()), loader(*images(24)), verbose=False)
        return (tmp_path / "report" / "report.json").read_text()

    assert judge() == judge(fast_dev_run=True)
