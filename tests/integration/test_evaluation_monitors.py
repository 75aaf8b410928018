"""Robust accuracy in logs, monitors and schedules of a real Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from robustdist.attacks import PGD
from robustdist.callbacks import RobustEvaluation
from robustdist.core.testing import toy_images
from robustdist.errors import UsageError

from .evaluation_support import GREY, RADIUS, Threshold, grey
from .support import Classifier, Memory, loader, make_trainer, trained_net


def fit(launch, *, processes, net=None, epochs=4, callbacks=(), collect, lr=0.0, **options):
    x, y = grey(GREY[:5])
    ours = {key: options.pop(key) for key in ("every_n_epochs",) if key in options}
    evaluation = RobustEvaluation({"pgd": PGD(eps=RADIUS, steps=3)}, **ours)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.threshold = Threshold()

        def forward(self, x):
            return self.scale * self.threshold(x)

    return launch(
        Classifier(Scaled(), lr=lr),
        loader(x, y, batch_size=2),
        loader(x, y, batch_size=2),
        processes=processes,
        max_epochs=epochs,
        callbacks=[evaluation, *callbacks],
        collect=collect,
        **options,
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("every_n_epochs", [1, 2])
def test_monitors_find_the_robust_accuracy(launch, tmp_path, processes, every_n_epochs):
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="robust/acc", mode="max", save_top_k=1)
    # weights do not move, so no epoch after the first is an improvement, whether it is evaluated or repeats the value
    stopping = EarlyStopping("robust/acc", mode="max", patience=every_n_epochs, strict=True)

    def collect(trainer, module):
        history = trainer.callbacks[0].history
        return trainer.current_epoch, float(checkpoint.best_model_score), [entry["epoch"] for entry in history], history

    ranks = fit(
        launch,
        processes=processes,
        every_n_epochs=every_n_epochs,
        callbacks=[stopping, checkpoint],
        enable_checkpointing=True,
        collect=collect,
    )
    for epochs, best, evaluated, history in ranks:
        assert epochs == 1 + every_n_epochs
        assert best == pytest.approx(0.4)
        assert evaluated == ([1, 2] if every_n_epochs == 1 else [1, 3])
        assert history[0]["acc"] == pytest.approx(0.4)
    assert len(list((tmp_path / "best").iterdir())) == 1


@pytest.mark.parametrize(
    ("every_n_epochs", "options", "epochs", "evaluated"),
    [
        (2, {}, 5, [1, 3, 5]),
        (2, {}, 4, [1, 3, 4]),
        (3, {}, 5, [1, 4, 5]),
        # validation itself happens in epochs 2, 4 and 6 only
        (2, {"check_val_every_n_epoch": 2}, 6, [2, 4, 6]),
        (3, {"check_val_every_n_epoch": 2}, 8, [2, 6, 8]),
        # three times per epoch
        (2, {"val_check_interval": 1}, 3, [1, 1, 1, 3, 3, 3]),
    ],
)
def test_every_n_epochs_logs_once_per_evaluation(launch, every_n_epochs, options, epochs, evaluated):
    logger = Memory()
    seen = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["robust/acc"]))

    (history,) = fit(
        launch,
        processes=1,
        every_n_epochs=every_n_epochs,
        epochs=epochs,
        callbacks=[Watch()],
        logger=logger,
        collect=lambda trainer, module: trainer.callbacks[0].history,
        **options,
    )
    assert [entry["epoch"] for entry in history] == evaluated
    assert len(logger.values("robust/acc")) == len(evaluated)
    assert seen == pytest.approx([0.4] * len(seen))


def test_a_learning_rate_follows_the_robust_accuracy(tmp_path):
    class Plateau(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "robust/acc"}}

    module = Plateau(trained_net(), lr=1e-6)  # nothing improves
    evaluation = RobustEvaluation({"pgd": PGD(eps=RADIUS, steps=3)}, every_n_epochs=2)
    trainer = make_trainer(callbacks=[evaluation], default_root_dir=tmp_path, max_epochs=4)
    x, y = toy_images(16)
    trainer.fit(module, loader(x, y), loader(x, y))
    # the first epoch sets the mark, the other three do not beat it
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-6 / 8)


def test_two_evaluations_need_two_prefixes(launch):
    weak, strong = {"weak": PGD(eps=0.01, steps=1)}, {"strong": PGD(eps=0.45, steps=3)}

    def collect(trainer, module):
        return {key: float(value) for key, value in trainer.callback_metrics.items()}

    with pytest.raises(UsageError, match="prefix"):
        launch(
            Classifier(Threshold()),
            loader(*grey(GREY)),
            verb="validate",
            callbacks=[RobustEvaluation(weak), RobustEvaluation(strong)],
        )
    (metrics,) = launch(
        Classifier(Threshold()),
        loader(*grey(GREY)),
        verb="validate",
        callbacks=[RobustEvaluation(weak), RobustEvaluation(strong, prefix="strong")],
        collect=collect,
    )
    assert metrics["robust/acc"] == metrics["robust/clean_acc"] == metrics["strong/clean_acc"] == pytest.approx(6 / 8)
    assert metrics["strong/acc"] == 0
