"""Everything at once, and torch.compile."""

from __future__ import annotations

import copy

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.objectives import DAT

from .support import Quiet, identical, largest_difference, loader, make_trainer, run, seeded_net, shares


def test_ranks_stay_equal_with_everything_switched_on(launch, images):
    x, y = images(64)
    net = seeded_net()
    averaging = EMAWeightAveraging(decay=0.9)

    def collect(trainer, module):
        evaluation = next(callback for callback in trainer.callbacks if isinstance(callback, RobustEvaluation))
        return {
            "weights": {name: value.clone() for name, value in module.state_dict().items()},
            "average": averaging._average_model.module.state_dict(),
            "current": averaging._average_model.n_averaged,
            "history": evaluation.history,
            "steps": trainer.global_step,
        }

    ranks = launch(
        Quiet(copy.deepcopy(net)),
        shares(x, y, 4),
        loader(x, y),
        processes=2,
        use_distributed_sampler=False,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_epochs=3,
        callbacks=[
            averaging,
            AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=2), eps_schedule=LinearRamp(0.5)),
            RobustEvaluation({"pgd": PGD(eps=0.1, steps=2)}),
        ],
        collect=collect,
    )
    assert identical(ranks[0]["weights"], ranks[1]["weights"])
    assert identical(ranks[0]["average"], ranks[1]["average"])
    assert ranks[0]["history"] == ranks[1]["history"]
    assert [entry["epoch"] for entry in ranks[0]["history"]] == [1, 2, 3]
    assert ranks[0]["steps"] == 12
    assert largest_difference(ranks[0]["weights"], {f"net.{k}": v for k, v in net.state_dict().items()}) > 1e-3


def test_averaged_weights_are_the_ones_that_are_evaluated(launch, images):
    x, y = images(64)

    def collect(trainer, module):
        evaluation = next(callback for callback in trainer.callbacks if isinstance(callback, RobustEvaluation))
        return evaluation.history, {name: value.clone() for name, value in module.state_dict().items()}

    def train(callbacks):
        return launch(
            Quiet(seeded_net(), lr=0.05),
            loader(x, y),
            loader(x, y),
            max_epochs=3,
            callbacks=[*callbacks, RobustEvaluation({"pgd": PGD(eps=0.02, steps=2)})],
            collect=collect,
        )[0]

    attack = AdversarialTraining(DAT(1.0), PGD(eps=0.02, steps=2))
    averaged_history, averaged = train([attack, EMAWeightAveraging(decay=0.99)])
    plain_history, plain = train([attack])
    # fit ends with the averaged weights: evaluating them anew gives what validation found
    module = Quiet(seeded_net())
    module.load_state_dict(averaged)
    (result,) = launch(
        module,
        loader(x, y),
        verb="validate",
        callbacks=[RobustEvaluation({"pgd": PGD(eps=0.02, steps=2)})],
        collect=lambda trainer, module: trainer.callbacks[0].result,
    )
    assert averaged_history[-1]["acc"] == result.robust_acc
    assert averaged_history[-1]["clean_acc"] == result.clean_acc
    assert largest_difference(averaged, plain) > 1e-3
    assert averaged_history != plain_history


def test_a_compiled_module_trains_as_the_plain_one(tmp_path, images):
    x, y = images(32)

    def train(compiled):
        torch.compiler.reset()
        module = Quiet(seeded_net())
        fitted = torch.compile(module, backend="eager") if compiled else module
        attributes = set(vars(module))
        attack = PGD(eps=0.0625, steps=2)
        evaluation = RobustEvaluation({"pgd": attack})
        trainer = make_trainer(callbacks=[AdversarialTraining(DAT(1.0), attack), evaluation], default_root_dir=tmp_path)
        trainer.fit(fitted, loader(x, y), loader(x, y))
        left = set(vars(module)) - attributes
        assert "training_step" not in vars(trainer.strategy)
        return {k: v.clone() for k, v in module.state_dict().items()}, evaluation.history, left

    plain, plain_history, _ = train(False)
    compiled, compiled_history, left = train(True)
    assert identical(plain, compiled)
    assert plain_history == compiled_history
    assert not {"log", "log_dict"} & left

    # what an ordinary training leaves on a compiled module is what ours leaves
    module = Quiet(seeded_net())
    fitted = torch.compile(module, backend="eager")
    attributes = set(vars(module))
    make_trainer(default_root_dir=tmp_path).fit(fitted, loader(x, y), loader(x, y))
    assert set(vars(module)) - attributes == left


def test_a_compiled_module_trains_as_the_plain_one_on_two_processes(launch, images):
    x, y = images(32)

    def train(wrap):
        torch.compiler.reset()
        callback = AdversarialTraining(DAT(1.0), PGD(eps=0.0625, steps=2))
        return launch(wrap(Quiet(seeded_net())), loader(x, y, batch_size=4), processes=2, callbacks=[callback])

    plain, compiled = train(lambda module: module), train(lambda module: torch.compile(module, backend="eager"))
    for one, other in zip(plain, compiled, strict=True):
        assert identical(one, other)


def test_the_module_can_be_copied_in_the_middle_of_training(tmp_path, images):
    import lightning.pytorch as pl

    x, y = images(32)
    copies = []

    class Copying(pl.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            trainer_of, pl_module._trainer = pl_module._trainer, None
            copies.append(copy.deepcopy(pl_module))
            pl_module._trainer = trainer_of

    attack = AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=2))
    run(tmp_path, Quiet(), loader(x, y), callbacks=[attack, Copying()])
    assert len(copies) == 4
    for copied in copies:
        assert not {"training_step", "forward", "log", "log_dict"} & set(vars(copied))
