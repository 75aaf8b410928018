"""Half a training, a checkpoint and the other half are the whole training, bit for bit."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from robustdist.attacks import PGD, LinearRamp
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.objectives import DAT

from .support import Classifier, identical, loader, make_trainer, seeded_net, shares


class Trace(pl.Callback):
    """Keeps the radius of every step."""

    def __init__(self):
        self.eps: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.eps.append(float(trainer.callback_metrics["robust/eps"]))


def callbacks(folder, every_n_epochs=1, **options):
    return [
        AdversarialTraining(DAT(1.0), PGD(eps=0.1, steps=2), eps_schedule=LinearRamp(1.0)),
        RobustEvaluation({"pgd": PGD(eps=0.1, steps=2)}, every_n_epochs=every_n_epochs),
        ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, **options),
        Trace(),
    ]


def collect(trainer, module):
    attack, evaluation = trainer.callbacks[0], trainer.callbacks[1]
    trace = next(callback for callback in trainer.callbacks if isinstance(callback, Trace))
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "seen": module.seen,
        "eps": trace.eps,
        "counters": attack.state_dict(),
        "history": evaluation.history,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "global_step": trainer.global_step,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_resumed_training_equals_an_uninterrupted_one(launch, tmp_path, images, processes):
    x, y = images(24)
    common = {
        "processes": processes,
        "max_epochs": 2,
        "use_distributed_sampler": False,
        "enable_checkpointing": True,
        "collect": collect,
    }
    data = shares(x, y, 8 // processes), loader(x, y)

    straight = launch(
        Classifier(seeded_net(batch_norm=True)), *data, callbacks=callbacks(tmp_path / "straight"), **common
    )
    checkpoint = tmp_path / "straight" / "epoch=0.ckpt"
    # other initial weights and another state of the global generator: both come from the checkpoint, or do not matter
    resumed = launch(
        Classifier(seeded_net(5, batch_norm=True)),
        *data,
        callbacks=callbacks(tmp_path / "resumed"),
        ckpt_path=checkpoint,
        **common,
    )

    for whole, half in zip(straight, resumed, strict=True):
        assert whole["global_step"] == half["global_step"] == 6
        assert identical(whole["weights"], half["weights"])
        states = whole["optimizer"]["state"], half["optimizer"]["state"]
        assert states[0].keys() == states[1].keys() != set()
        for key in states[0]:
            assert torch.equal(states[0][key]["momentum_buffer"], states[1][key]["momentum_buffer"])
        # two passes per step: the adversarial images of the second half are the same ones
        assert len(whole["seen"]) == 12
        assert len(half["seen"]) == 6
        assert torch.equal(torch.stack(whole["seen"][6:]), torch.stack(half["seen"]))
        assert whole["eps"][3:] == half["eps"]
        assert whole["eps"] == pytest.approx([0.1 * step / 6 for step in range(1, 7)])
        assert (
            whole["counters"]
            == half["counters"]
            == {"num_attacks": 6, "num_steps": 6, "started_at": 0, "step_factor": 1.0}
        )
        assert whole["history"] == half["history"]
        assert [entry["epoch"] for entry in half["history"]] == [1, 2]
    assert identical(straight[0]["optimizer"]["state"][0], straight[-1]["optimizer"]["state"][0])


def test_the_checkpoint_holds_plain_values_only(launch, tmp_path, images):
    x, y = images(24)
    launch(
        Classifier(),
        loader(x, y),
        loader(x, y),
        callbacks=callbacks(tmp_path / "saved"),
        enable_checkpointing=True,
    )
    saved = torch.load(tmp_path / "saved" / "epoch=0.ckpt", weights_only=True)
    ours = {key: state for key, state in saved["callbacks"].items() if "Robust" in key or "Adversarial" in key}
    assert len(ours) == 2

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(plain(item) for item in value)
        return type(value) in (int, float, str)

    assert all(plain(state) for state in ours.values())


@pytest.mark.parametrize("processes", [1, 2])
def test_monitors_have_a_value_after_resuming_between_two_evaluations(launch, tmp_path, images, processes):
    x, y = images(24)
    common = {
        "processes": processes,
        "max_epochs": 4,
        "use_distributed_sampler": False,
        "enable_checkpointing": True,
        "collect": collect,
    }
    data = shares(x, y, 8 // processes), loader(x, y)

    def configured(folder):
        return [*callbacks(folder, 2, monitor="robust/acc"), EarlyStopping("robust/acc", mode="max", patience=9)]

    straight = launch(Classifier(), *data, callbacks=configured(tmp_path / "straight"), **common)
    resumed = launch(
        Classifier(),
        *data,
        callbacks=configured(tmp_path / "resumed"),
        ckpt_path=tmp_path / "straight" / "epoch=0.ckpt",
        **common,
    )
    for whole, half in zip(straight, resumed, strict=True):
        assert [entry["epoch"] for entry in whole["history"]] == [1, 3, 4]
        assert whole["history"] == half["history"]
        assert whole["metrics"] == half["metrics"]


def test_a_new_training_starts_its_counters_anew(launch, images):
    x, y = images(24)
    attack = AdversarialTraining(attack=PGD(eps=0.1, steps=1), eps_schedule=LinearRamp(1.0))
    evaluation = RobustEvaluation({"pgd": PGD(eps=0.1, steps=1)})

    def train():
        trace = Trace()
        module = Classifier()
        launch(module, loader(x, y), loader(x, y), callbacks=[attack, evaluation, trace])
        return trace.eps, torch.stack(module.seen), list(evaluation.history)

    first, second = train(), train()
    assert first[0] == second[0] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]


def test_a_longer_training_goes_on_where_the_first_ended(launch, tmp_path, images):
    x, y = images(24)
    common = {"enable_checkpointing": True, "collect": collect}
    launch(Classifier(), loader(x, y), loader(x, y), callbacks=callbacks(tmp_path / "first"), **common)
    (longer,) = launch(
        Classifier(),
        loader(x, y),
        loader(x, y),
        callbacks=callbacks(tmp_path / "second"),
        ckpt_path=tmp_path / "first" / "epoch=0.ckpt",
        max_epochs=2,
        **common,
    )
    assert longer["eps"] == pytest.approx([0.1 * step / 6 for step in (4, 5, 6)])
    assert [entry["epoch"] for entry in longer["history"]] == [1, 2]


def test_one_trainer_may_train_on(tmp_path, images):
    x, y = images(24)
    configured = callbacks(tmp_path / "saved")
    trainer = make_trainer(callbacks=configured, default_root_dir=tmp_path, enable_checkpointing=True)
    module = Classifier()
    trainer.fit(module, loader(x, y), loader(x, y))
    assert configured[0].state_dict() == {"num_attacks": 3, "num_steps": 3, "started_at": 0, "step_factor": 1.0}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(x, y), loader(x, y))
    assert configured[0].state_dict() == {"num_attacks": 6, "num_steps": 6, "started_at": 0, "step_factor": 1.0}
    assert [entry["epoch"] for entry in configured[1].history] == [1, 2]


def test_a_rehearsal_does_not_count(tmp_path, images):
    x, y = images(64)
    configured = callbacks(tmp_path / "saved")
    trainer = make_trainer(callbacks=configured, default_root_dir=tmp_path, enable_checkpointing=True)
    module = Classifier()
    Tuner(trainer).lr_find(module, loader(x, y), loader(x, y), num_training=5, update_attr=False)
    assert configured[0].state_dict() == {"num_attacks": 0, "num_steps": 0, "started_at": None, "step_factor": 1.0}
    configured[-1].eps.clear()
    trainer.fit(module, loader(x, y), loader(x, y))
    assert configured[-1].eps == pytest.approx([0.1 * step / 8 for step in range(1, 9)])
    assert [entry["epoch"] for entry in configured[1].history] == [1]
