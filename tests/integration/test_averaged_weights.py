"""Every objective with averaged weights, accumulation, clipping, bfloat16 and two processes, all at once."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.cli.trainer import RobustTrainer
from robustdist.errors import RobustDistWarning
from tests.unit.objectives.test_family import ROWS

from .support import Classifier, identical, loader, make_trainer, seeded_net

DECAY = 0.5


class Averages(pl.Callback):
    """Averages the weights after every optimiser step once more, from the formula."""

    def __init__(self):
        self.average: dict[str, torch.Tensor] = {}
        self.num_updates = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.num_updates:
            return
        self.num_updates += 1
        for name, value in pl_module.named_parameters():
            now = value.detach().clone()
            self.average[name] = DECAY * self.average[name] + (1 - DECAY) * now if self.num_updates > 1 else now


def adversarial(objective):
    return AdversarialTraining(objective, PGD(eps=0.125, steps=2))


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_objective_combines_with_all_of_it(launch, tmp_path, images, row):
    x, y = images(48)
    averages = Averages()
    callbacks = [
        adversarial(row.make()),
        averages,
        EMAWeightAveraging(decay=DECAY),
        RobustEvaluation({"pgd": PGD(eps=0.125, steps=1)}),
        ModelCheckpoint(tmp_path, filename="best", monitor="robust/acc", mode="max"),
    ]

    def collect(trainer, module):
        return (
            module.state_dict(),
            averages.average,
            averages.num_updates,
            float(trainer.callback_metrics["robust/acc"]),
        )

    net = seeded_net(batch_norm=True)
    start = {f"net.{name}": value.clone() for name, value in net.named_parameters()}
    ranks = launch(
        Classifier(net),
        loader(x, y, batch_size=4),
        loader(x[:8], y[:8]),
        processes=2,
        callbacks=callbacks,
        collect=collect,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        precision="bf16-mixed",
        enable_checkpointing=True,
    )

    parameters = start.keys()
    assert identical(*({name: state[name] for name in parameters} for state, *_ in ranks))
    for state, average, num_updates, accuracy in ranks:
        assert num_updates == 3
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
        assert not torch.equal(state["net.head.weight"], start["net.head.weight"])
        # after the training the module has the averages
        assert_close(state, average)
        assert 0 <= accuracy <= 1
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert_close(saved["state_dict"], ranks[0][1])
    assert float((saved["current_model_state"]["net.head.weight"] - ranks[0][1]["net.head.weight"]).abs().max()) > 1e-5
    Classifier(seeded_net(batch_norm=True)).load_state_dict(saved["state_dict"], strict=True)


class Watching(PGD):
    """Keeps the weights that it attacks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attacked: list[dict[str, torch.Tensor]] = []

    def run(self, model, *args, **options):
        self.attacked.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return super().run(model, *args, **options)


def test_evaluation_monitor_and_checkpoint_are_about_the_averages(tmp_path, images):
    x, y = images(64)
    watching, averages = Watching(eps=0.1, steps=2), Averages()
    after_epochs: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    class Epochs(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
            after_epochs.append((dict(averages.average), weights))

    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="robust/acc", mode="max", save_top_k=-1)
    evaluation = RobustEvaluation({"pgd": watching})
    trainer = make_trainer(
        callbacks=[adversarial(None), averages, EMAWeightAveraging(decay=DECAY), evaluation, checkpoint, Epochs()],
        max_epochs=3,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    module = Classifier()
    trainer.fit(module, loader(x, y), loader(x, y, batch_size=64))

    attacked = watching.attacked
    for epoch, (average, current) in enumerate(after_epochs):
        assert_close(attacked[epoch], average)
        assert float((current["net.head.weight"] - average["net.head.weight"]).abs().max()) > 1e-4
        assert_close(torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"], average)
    assert len(attacked) == len(after_epochs) == 3
    scores = [float(score) for score in checkpoint.best_k_models.values()]
    assert float(checkpoint.best_model_score) == max(scores)
    best = float(checkpoint.best_model_score)
    data = loader(x, y, batch_size=64)
    # the best checkpoint gives the accuracy that it was chosen for: in a new Trainer, with averaging or without
    for averaging in ([], [EMAWeightAveraging(decay=DECAY)]):
        fresh = make_trainer(callbacks=[RobustEvaluation({"pgd": watching}), *averaging], default_root_dir=tmp_path)
        (metrics,) = fresh.test(Classifier(), data, ckpt_path=checkpoint.best_model_path, verbose=False)
        assert metrics["robust/acc"] == pytest.approx(best)
    # the old one loads the weights behind the averages, and is said to
    with pytest.warns(RobustDistWarning, match="test runs on the weights before averaging"):
        trainer.test(module, data, ckpt_path="best", verbose=False)


def test_the_final_judgement_of_the_command_is_about_the_averages(tmp_path, images):
    x, y = images(64)
    checkpoint = ModelCheckpoint(tmp_path, monitor="robust/acc", mode="max")
    attack = PGD(eps=0.1, steps=2)
    trainer = RobustTrainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EMAWeightAveraging(decay=DECAY), RobustEvaluation({"pgd": attack}), checkpoint],
    )
    module = Classifier()
    trainer.fit(module, loader(x, y), loader(x, y, batch_size=64))
    result = trainer.evaluate_with(
        RobustEvaluation({"pgd": attack}), module, loader(x, y, batch_size=64), ckpt_path=trainer.best_checkpoint
    )
    assert result.robust_acc == pytest.approx(float(checkpoint.best_model_score))
