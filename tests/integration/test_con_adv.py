"""Attacks on past weights under a Trainer: which weights they are, and that a checkpoint keeps them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.objectives import DAT, ConAdv

from .support import Classifier, identical, largest_difference, loader, seeded_net, shares


class Watching(PGD):
    """Keeps the weights that it attacks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attacked: list[torch.Tensor] = []

    def run(self, model, *args, **options):
        self.attacked.append(model.net.head.weight.detach().clone())
        return super().run(model, *args, **options)


class Weights(Classifier):
    """Keeps its weights at the start of every step."""

    def __init__(self, net=None):
        super().__init__(net)
        self.past: list[torch.Tensor] = []

    def on_train_batch_start(self, batch, batch_idx):
        self.past.append(self.net.head.weight.detach().clone())


@pytest.mark.parametrize("stale", [0, 1, 3])
@pytest.mark.parametrize("extra", [[], [EMAWeightAveraging(decay=0.5)]], ids=["alone", "averaged"])
def test_the_attack_sees_the_weights_of_so_many_steps_ago(launch, images, stale, extra):
    x, y = images(48)
    module, attack = Weights(), Watching(eps=0.1, steps=2)
    # the averages are swapped in for a validation in the middle
    callbacks = [AdversarialTraining(ConAdv(stale), attack), *extra]
    launch(module, loader(x, y), loader(x[:8], y[:8]), callbacks=callbacks, val_check_interval=3)

    assert len(module.past) == 6
    attacked = attack.attacked[1:]  # the first one tries the first batch
    for step in range(6):
        assert torch.equal(attacked[step], module.past[max(0, step - stale)])
        if 0 < stale <= step:
            assert not torch.equal(attacked[step], module.past[step])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("averaging", [False, True])
def test_a_resumed_training_is_the_whole_one(launch, tmp_path, images, processes, averaging):
    x, y = images(32)
    common = {"processes": processes, "max_epochs": 2, "use_distributed_sampler": False, "enable_checkpointing": True}

    def collect(trainer, module):
        return module.state_dict(), torch.stack(module.seen)

    def callbacks(folder):
        extra = [EMAWeightAveraging(decay=0.5)] if averaging else []
        saving = ModelCheckpoint(tmp_path / folder, filename="{epoch}", save_top_k=-1)
        return [AdversarialTraining(ConAdv(2), PGD(eps=0.1, steps=2)), *extra, saving]

    data = shares(x, y, 8 // processes)
    straight = launch(
        Classifier(seeded_net(batch_norm=True)), data, callbacks=callbacks("straight"), collect=collect, **common
    )
    checkpoint = tmp_path / "straight" / "epoch=0.ckpt"
    resumed = launch(
        Classifier(seeded_net(5, batch_norm=True)),
        data,
        callbacks=callbacks("resumed"),
        collect=collect,
        ckpt_path=checkpoint,
        **common,
    )
    for rank, (whole, half) in enumerate(zip(straight, resumed, strict=True)):
        # Lightning saves the buffers of the first process alone, and averages those of the others on their own
        names = [name for name in whole[0] if rank == 0 or "running" not in name]
        assert [name for name in names if not torch.equal(whole[0][name], half[0][name])] == []
        assert torch.equal(whole[1][8:], half[1])
    saved = torch.load(checkpoint, weights_only=True)
    (state,) = (state for key, state in saved["callbacks"].items() if "Adversarial" in key)
    assert len(state["objective"]) == 1, "equal on all processes"
    assert len(state["objective"][0]["past"]) == 2
    Classifier(seeded_net(batch_norm=True)).load_state_dict(saved["state_dict"], strict=True)


def test_without_staleness_it_is_dat(launch, images):
    x, y = images(32)
    states = [
        launch(Classifier(), loader(x, y), callbacks=[AdversarialTraining(objective, PGD(eps=0.1, steps=2))])[0]
        for objective in (ConAdv(0), DAT(1.0))
    ]
    assert identical(*states)


def test_statistics_are_those_of_the_clean_stream(launch, images):
    # with weights that do not move, training on clean images alone gives the same running statistics
    x, y = images(32)
    buffers = []
    for callbacks in ([AdversarialTraining(ConAdv(1), PGD(eps=0.3, steps=2))], []):
        module = Classifier(seeded_net(batch_norm=True), lr=0.0)
        launch(module, loader(x, y), callbacks=callbacks)
        buffers.append({name: value.clone() for name, value in module.named_buffers()})
    assert largest_difference(*buffers) == 0
    assert int(buffers[0]["net.norm.num_batches_tracked"]) == 4
