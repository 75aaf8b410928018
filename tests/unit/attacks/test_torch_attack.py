"""What the wrapper around torchattacks adds to its classes, and what it must not change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from robustdist.attacks import TorchAttack


@pytest.fixture(autouse=True)
def needs_torchattacks(require):
    require("torchattacks")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BIM", {"eps": 0.1, "alpha": 0.02, "steps": 4}),
        ("MIFGSM", {"eps": 0.1, "alpha": 0.02, "steps": 4}),
        ("FAB", {"eps": 0.1, "steps": 4}),
        ("CW", {"c": 5, "lr": 0.05, "steps": 20}),
        ("DeepFool", {"steps": 10}),
        ("EADL1", {"max_iterations": 20, "binary_search_steps": 2, "lr": 0.05, "initial_const": 10}),
    ],
)
def test_finds_what_the_class_itself_finds(task, name, settings):
    import torchattacks

    net, x, y = task
    x, y = x[:5], y[:5]
    n_classes = {"n_classes": 5} if name == "FAB" else {}
    # some leave the image box, which the wrapper does not allow
    expected = getattr(torchattacks, name)(net, **settings, **n_classes)(x, y).clamp(0, 1)
    x_adv = TorchAttack(name, settings)(net, x, y)
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-6)
    assert float((expected - x).abs().max()) > 0.01


def test_attacks_without_a_radius_are_not_taken_for_radius_zero(task):
    net, x, y = task
    for name in ("CW", "DeepFool", "OnePixel", "GN"):
        result = TorchAttack(name, {"CW": {"c": 5, "lr": 0.05}}.get(name, {})).run(net, x[:5], y[:5])
        assert not torch.equal(result.x_adv, x[:5]), name
        assert 0.0 <= float(result.x_adv.min()) <= float(result.x_adv.max()) <= 1.0


@pytest.mark.parametrize("targeted", [False, True], ids=["untargeted", "targeted"])
def test_targets(task, targeted):
    net, x, y = task
    target = (y + 3) % 5 if targeted else y
    x_adv = TorchAttack("PGD", eps=0.3, alpha=0.03, steps=20, targeted=targeted)(net, x, target)
    with torch.no_grad():
        predicted = net(x_adv).argmax(1)
    assert float(((predicted == target) == targeted).float().mean()) >= 0.9


@pytest.mark.parametrize("num_classes", [4, 7, 12])
@pytest.mark.parametrize("name", ["APGDT", "FAB", "JSMA"])
def test_class_count_follows_the_model(name, num_classes):
    """A tiny radius: every image survives, so every target class is tried."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes))
    x = torch.rand(6, 3, 4, 4)
    with torch.no_grad():
        y = net(x).argmax(1)
        y[0] = num_classes - 1
    settings = {
        "APGDT": {"eps": 1e-4, "steps": 2},
        "FAB": {"eps": 1e-4, "steps": 2, "multi_targeted": True},
        "JSMA": {},
    }
    seen = []

    def forward(inputs):
        seen.append(len(inputs))
        return net(inputs)

    x_adv = TorchAttack(name, settings[name])(net, x, y, forward=forward)
    assert x_adv.shape == x.shape
    if name == "APGDT":
        # one call to check the targets, one for the clean accuracy, then two and the steps for each other class
        assert len(seen) == 2 + 4 * (num_classes - 1)


def test_two_and_three_classes(task):
    x, y = torch.rand(8, 3, 4, 4), torch.arange(8) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    for name, settings in (("APGD", {}), ("FAB", {}), ("Square", {"n_queries": 20}), ("JSMA", {}), ("DeepFool", {})):
        assert TorchAttack(name, settings)(net, x, y).shape == x.shape
    three = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    assert TorchAttack("APGD", loss="dlr")(three, x, y).shape == x.shape


@pytest.mark.parametrize("name", ["APGD", "APGDT", "Square"])
def test_classes_with_an_own_seed_follow_rank_and_step(task, name):
    net, x, y = task
    settings = {"eps": 0.25, "n_queries": 60} if name == "Square" else {"eps": 0.12, "steps": 4}
    results = [TorchAttack(name, settings)(net, x, y, rank=rank) for rank in (0, 1)]
    assert not torch.equal(*results)
    pinned = [TorchAttack(name, {**settings, "seed": 4})(net, x, y, rank=rank) for rank in (0, 1)]
    assert torch.equal(*pinned)


def test_classes_that_draw_from_numpy_are_reproducible(task):
    import numpy as np

    net, x, y = task
    results = []
    for seed in (0, 1):
        np.random.seed(seed)
        results.append(TorchAttack("Pixle", restarts=2)(net, x[:3], y[:3], step=7))
    assert torch.equal(*results)
    assert not torch.equal(results[0], x[:3])


def test_lengths_are_in_pixel_units(task):
    net, x, y = task
    expected = TorchAttack("BIM", eps="16/256", alpha="4/256", steps=6)(net, x, y)

    class From256(nn.Module):
        def forward(self, inputs):
            return net(inputs / 256)

    x_adv = TorchAttack("BIM", eps=16, alpha=4, steps=6, bounds=(0, 256))(From256(), x * 256, y)
    torch.testing.assert_close(x_adv, expected * 256, rtol=0, atol=1e-4)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
    shift, scale = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    class FromNormalised(nn.Module):
        def forward(self, inputs):
            return net(inputs * scale + shift)

    attack = TorchAttack("BIM", eps="16/256", alpha="4/256", steps=6, mean=mean, std=std)
    x_adv = attack(FromNormalised(), (x - shift) / scale, y)
    moved = (x_adv * scale + shift - x).abs()
    assert float(moved.max()) == pytest.approx(16 / 256, abs=1e-6)
    assert float((x_adv * scale + shift - expected).abs().mean()) < 1e-3


@pytest.mark.parametrize("settings", [{"alpha": 0.04}, {}], ids=["given", "default"])
def test_scales_reach_radius_and_step(task, settings):
    net, x, y = task
    x = x.clamp(0.2, 0.8)
    one_step = TorchAttack("BIM", eps=0.08, steps=1, **settings).run(net, x, y, eps_scale=0.5, step_scale=0.25)
    step = settings.get("alpha", 2 / 255) * 0.25
    assert float((one_step.x_adv - x).abs().max()) == pytest.approx(step, abs=1e-6)
    many_steps = TorchAttack("BIM", eps=0.08, steps=20, **settings).run(net, x, y, eps_scale=0.5)
    assert float((many_steps.x_adv - x).abs().max()) == pytest.approx(0.04, abs=1e-6)


def test_norm_comes_from_the_settings_or_the_class(task):
    net, x, y = task
    assert TorchAttack("PGDL2").norm == "l2"
    assert TorchAttack("PGD").norm == "linf"
    assert TorchAttack("APGD", norm="L2", eps=1).norm == "l2"
    attack = TorchAttack("APGD", norm="l2", eps=2, steps=5)
    lengths = (attack(net, x, y) - x).flatten(1).norm(dim=1)
    assert 1 < float(lengths.max()) <= 2 + 1e-5


def test_the_network_stays_in_eval_mode_during_the_attack(task):
    net, x, y = task
    net.train()
    seen = set()
    net.norm1.register_forward_hook(lambda module, *_: seen.add(module.training))
    TorchAttack("PGD", steps=2)(net, x, y)
    assert seen == {False}
    assert net.training


def test_settings_are_plain_values():
    settings = TorchAttack("APGDT", norm="linf", eps="8/255", steps=20, seed=3).settings()
    assert settings == {
        "attack": "TorchAttack",
        "name": "APGDT",
        "norm": "linf",
        "eps": 8 / 255,
        "steps": 20,
        "seed": 3,
        "targeted": False,
    }
    assert "eps" not in TorchAttack("CW").settings()
