"""The template that all attacks share: projection, modes, precision, pixel units, targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, Attack
from robustdist.attacks.functional import distance
from robustdist.errors import UsageError

EPS = 0.1
CIFAR_MEAN, CIFAR_STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


class Normalize(nn.Module):
    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float64).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Scaled(nn.Module):
    def __init__(self, net: nn.Module, factor: float, probabilities: bool = False) -> None:
        super().__init__()
        self.net, self.factor, self.probabilities = net, factor, probabilities

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x) * self.factor
        return logits.softmax(1) if self.probabilities else logits


# --- the template


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_base_class_projects_whatever_an_attack_returns(task, norm):
    class Wild(Attack):
        def perturb(self, problem):
            return problem.x + 10 * torch.randn(problem.x.shape)

    net, x, y = task
    eps = {"linf": 0.1, "l2": 1.0, "l1": 5.0}[norm]
    x_adv = Wild(norm=norm, eps=eps)(net, x, y)
    lengths = torch.linalg.vector_norm((x_adv.double() - x).flatten(1), ord=float(norm[1:]), dim=1)
    assert 0.2 * eps < float(lengths.max()) <= eps + 1e-6
    assert 0.0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1.0


def test_an_attack_may_write_into_its_problem_but_not_into_the_users_input(task):
    class Writing(Attack):
        def perturb(self, problem):
            return problem.x.add_(0.05)

    net, x, y = task
    before = x.clone()
    x_adv = Writing(eps=EPS)(net, x, y)
    assert torch.equal(x, before)
    assert not torch.equal(x_adv, before)


def test_a_forward_that_writes_into_its_input_does_not_reach_the_users(task):
    net, x, y = task
    before = x.clone()

    def forward(inputs):
        with torch.no_grad():
            return net(inputs.mul_(0.5))

    with pytest.raises(UsageError, match="does not depend on its input"):
        PGD(eps=EPS, random_start=False)(net, x, y, forward=forward)
    assert torch.equal(x, before)


def test_a_radius_of_zero_returns_a_copy(task):
    net, x, y = task
    x_adv = PGD(eps=0.0)(net, x, y)
    assert torch.equal(x_adv, x)
    x_adv.add_(1)
    assert float(x.max()) <= 1


@pytest.mark.parametrize("model_mode", ["eval", "train"])
def test_model_mode_is_what_the_network_sees(task, model_mode):
    net, x, y = task
    net.train()
    net.norm2.eval()
    seen = {}
    for name, child in net.named_children():
        child.register_forward_hook(lambda module, *_, name=name: seen.setdefault(name, set()).add(module.training))
    PGD(steps=2, model_mode=model_mode)(net, x, y)
    training = model_mode == "train"
    assert seen.pop("norm2") == {False}
    assert seen == {name: {training} for name in ("conv1", "norm1", "conv2", "dropout", "head")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_loss_sees_logits_in_at_least_float32(task, dtype):
    net, x, y = task
    seen = set()

    def attack_loss(logits: Tensor, target: Tensor) -> Tensor:
        seen.add(logits.dtype)
        return F.cross_entropy(logits, target, reduction="none")

    PGD(steps=1, restarts=2, attack_loss=attack_loss)(net.to(dtype), x.to(dtype), y)
    assert seen == {torch.float64 if dtype == torch.float64 else torch.float32}


# --- precision


@pytest.mark.parametrize("statistics", [False, True], ids=["pixels", "normalised"])
@pytest.mark.parametrize("eps", ["8/255", "2/255", "1/255", 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_respect_the_radius(dtype, eps, statistics):
    mean, std = torch.tensor(CIFAR_MEAN).view(3, 1, 1), torch.tensor(CIFAR_STD).view(3, 1, 1)
    pixels = torch.rand(4, 3, 16, 16)
    pixels[0, :, :8] = pixels[0, :, :8].round()  # black and white
    x = ((pixels - mean) / std if statistics else pixels).to(dtype)
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 10)).to(dtype)
    options = {"mean": CIFAR_MEAN, "std": CIFAR_STD} if statistics else {}
    attack = PGD(eps=eps, steps=5, **options)
    x_adv = attack(net, x, torch.arange(4))
    moved = x_adv.double() - x.double()
    if statistics:
        moved = moved * std
    assert float(moved.abs().max()) <= float(torch.tensor(attack.eps)) + (1e-7 if statistics else 0.0)
    spacing = torch.finfo(dtype).eps
    if attack.eps > 2 * spacing:
        # going back is the exception, the radius is used
        assert float(moved.abs().median()) > 0.8 * attack.eps


@pytest.mark.parametrize(("norm", "eps"), [("l2", 1.0), ("l1", 12.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_respect_the_radius_of_sums(dtype, norm, eps):
    # the roundings of 768 entries add up
    x = torch.rand(8, 3, 16, 16).to(dtype)
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 10)).to(dtype)
    x_adv = PGD(norm=norm, eps=eps, steps=5)(net, x, torch.arange(8))
    moved = distance(x_adv.double(), x.double(), norm)
    assert float(moved.max()) <= eps
    assert float(moved.min()) > 0.9 * eps


def test_float64_is_not_lowered_on_the_way(task):
    net, x, y = task.net.double(), task.x.double(), task.y
    result = FGSM(eps=EPS)(net, x, y)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(net(leaf), y), leaf)
    torch.testing.assert_close(result, (x + EPS * grad.sign()).clamp(0, 1), rtol=0, atol=1e-15)


def test_weights_used_in_a_no_grad_pass_under_autocast_still_get_gradients(task):
    """Restarts score candidates without a graph; autocast must not hand those weight copies to the training step."""
    net, x, y = task

    def gradients(attack: PGD | None) -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            if attack is not None:
                attack(net, x, y)
            loss = F.cross_entropy(net(x).float(), y)
        loss.backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    for with_attack, without in zip(gradients(PGD(steps=2, restarts=2)), gradients(None), strict=True):
        assert torch.equal(with_attack, without)


# --- pixel units


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_normalised_batches_are_attacked_in_pixel_units(task, norm):
    net, x, y = task.net.double(), task.x.double(), task.y
    normalize = Normalize(CIFAR_MEAN, CIFAR_STD)
    eps, step_size = {"linf": ("8/255", "2/255"), "l2": (1, 0.4), "l1": (6, 2)}[norm]
    options = {"norm": norm, "eps": eps, "step_size": step_size, "steps": 4}
    in_pixels = PGD(**options)(nn.Sequential(normalize, net).eval(), x, y)
    normalised = PGD(**options, mean=CIFAR_MEAN, std=CIFAR_STD)(net, normalize(x), y)
    torch.testing.assert_close(normalised, normalize(in_pixels), rtol=0, atol=1e-10)
    back = normalised * normalize.std + normalize.mean
    assert float((back - x).flatten(1).norm(dim=1, p=float(norm[1:])).max()) <= PGD(**options).eps + 1e-6
    assert -1e-6 <= float(back.min()) <= float(back.max()) <= 1 + 1e-6
    assert float(normalize(x).min()) < -1.5  # what an attack assuming [0, 1] would have cut off


def test_scalar_statistics_serve_every_channel_and_flat_inputs(task):
    net, x, y = task
    shared = PGD(eps=EPS, steps=2, mean=0.5, std=0.25)(net, (x - 0.5) / 0.25, y)
    listed = PGD(eps=EPS, steps=2, mean=[0.5] * 3, std=[0.25] * 3)(net, (x - 0.5) / 0.25, y)
    assert torch.equal(shared, listed)
    assert float((shared * 0.25 + 0.5 - x).abs().max()) <= EPS + 1e-6
    flat = nn.Linear(6, 5)
    x_flat = torch.rand(4, 6)
    per_feature = PGD(eps=EPS, steps=2, mean=[0.1] * 6, std=[0.2] * 6)(flat, (x_flat - 0.1) / 0.2, y[:4])
    assert EPS / 2 < float((per_feature * 0.2 + 0.1 - x_flat).abs().max()) <= EPS + 1e-6


def test_bounds_other_than_the_unit_interval(task):
    net, x, y = task

    class From255(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return net(inputs / 256)

    attack = PGD(eps=16, step_size=4, steps=4, bounds=(0, 256), random_start=False)
    expected = PGD(eps=16 / 256, step_size=4 / 256, steps=4, random_start=False)(net, x, y)
    assert torch.equal(attack(From255(), x * 256, y), expected * 256)
    free = PGD(eps=5, step_size=2, steps=4, bounds=None)(net, x - 20, y)
    assert 4 < float((free - (x - 20)).abs().max()) <= 5 + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_radius_returns_the_clean_input_without_a_forward(task, dtype):
    net, x, y = task
    x = x.to(dtype, memory_format=torch.channels_last)
    for attack, scale in ((PGD(eps=0, mean=0.3, std=0.1, bounds=None), 1.0), (PGD(eps=EPS), 0.0)):
        result = attack.run(net.to(dtype), x, y, eps_scale=scale)
        assert torch.equal(result.x_adv, x)
        assert result.x_adv.data_ptr() != x.data_ptr()
        assert result.x_adv.stride() == x.stride()
        assert result.no_gradient.tolist() == [False] * len(x)
    assert net.num_forwards == 0


def test_empty_batch(task):
    net, x, y = task
    result = PGD().run(net, x[:0], y[:0])
    assert result.x_adv.shape == x[:0].shape
    assert result.no_gradient.shape == (0,)


def test_scales_multiply_radius_and_step(task):
    net, x, y = task
    half = PGD(eps=EPS, step_size=0.04, steps=4, random_start=False).run(net, x, y, eps_scale=0.5, step_scale=0.25)
    direct = PGD(eps=EPS / 2, step_size=0.01, steps=4, random_start=False)(net, x, y)
    assert torch.equal(half.x_adv, direct)


# --- targets and outputs


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("attack_loss", ["ce", "margin"])
def test_any_integer_type_holds_class_indices(task, dtype, attack_loss):
    net, x, y = task
    attack = PGD(eps=EPS, steps=2, restarts=2, attack_loss=attack_loss)
    assert torch.equal(attack(net, x, y.to(dtype)), attack(net, x, y))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_custom_loss_takes_any_target(task, context):
    net, x, _ = task

    def attack_loss(logits: Tensor, target: dict) -> Tensor:
        bits, (weight,) = target["bits"], target["weights"]
        return (weight * F.binary_cross_entropy_with_logits(logits, bits, reduction="none")).sum(1)

    with context():
        target = {"bits": (torch.rand(10, 5) > 0.5).float(), "weights": [torch.linspace(1, 2, 5)], "name": "a"}
        before = attack_loss(net(x), target)
        attack = PGD(eps=EPS, steps=3, restarts=2, attack_loss=attack_loss)
        after = attack_loss(net(attack(net, x.clone(), target)), target)
    assert bool((after > before).all())


def test_scalar_custom_loss_is_accepted(task):
    net, x, y = task
    summed = PGD(eps=EPS, steps=2, attack_loss=lambda logits, target: F.cross_entropy(logits, target, reduction="sum"))
    assert torch.equal(summed(net, x, y), PGD(eps=EPS, steps=2)(net, x, y))


def test_outputs_that_carry_logits(task):
    net, x, y = task
    expected = FGSM(eps=EPS)(net, x, y)

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    for wrap in (Output, lambda logits: {"logits": logits, "loss": None}):
        assert torch.equal(FGSM(eps=EPS)(net, x, y, forward=lambda images, wrap=wrap: wrap(net(images))), expected)


def test_forward_option_names_the_attacked_function(task):
    net, x, y = task
    attacked = FGSM(eps=EPS)(net, x, y, forward=lambda images: -net(images))
    assert torch.equal(attacked, FGSM(eps=EPS)(Scaled(net, -1.0).eval(), x, y))
    assert not torch.equal(attacked, FGSM(eps=EPS)(net, x, y))


def test_settings_are_plain_values():
    settings = PGD(eps="8/255", steps=3, mean=[0.1, 0.2], std=[1, 2], attack_loss=F.cross_entropy).settings()
    assert settings["attack"] == "PGD"
    assert settings["eps"] == 8 / 255
    assert settings["steps"] == 3
    assert settings["bounds"] == [0.0, 1.0]
    assert settings["mean"] == [0.1, 0.2]
    assert settings["attack_loss"] == "cross_entropy"
    assert "steps=3" in repr(PGD(steps=3))
