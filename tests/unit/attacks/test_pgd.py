"""PGD against torchattacks, against loops written here, and in the places where attacks fail silently."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD

EPS, STEP = 0.1, 0.03


class Scaled(nn.Module):
    def __init__(self, net: nn.Module, factor: float, probabilities: bool = False) -> None:
        super().__init__()
        self.net, self.factor, self.probabilities = net, factor, probabilities

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x) * self.factor
        return logits.softmax(1) if self.probabilities else logits


# --- the formula


@pytest.mark.parametrize("targeted", [False, True], ids=["untargeted", "targeted"])
@pytest.mark.parametrize("start", ["clean", "random"])
def test_equals_torchattacks_bit_for_bit(task, require, monkeypatch, start, targeted):
    require("torchattacks")
    import torchattacks

    net, x, y = task
    y = (y + 2) % 5 if targeted else y
    reference = torchattacks.PGD(net, eps=EPS, alpha=STEP, steps=6, random_start=start == "random")
    if targeted:
        reference.set_mode_targeted_by_label(quiet=True)
    torch.manual_seed(11)
    noise = torch.empty_like(x).uniform_(-EPS, EPS)
    torch.manual_seed(11)
    expected = reference(x, y)
    monkeypatch.setattr("robustdist.attacks.problem.random_start", lambda images, *_: (images + noise).clamp(0, 1))
    attack = PGD(eps=EPS, step_size=STEP, steps=6, random_start=start == "random", targeted=targeted)
    assert torch.equal(attack(net, x, y), expected)
    assert float((expected - x).abs().mean()) > EPS / 2


def naive_l2_pgd(net: nn.Module, x: Tensor, y: Tensor, start: Tensor, eps: float, alpha: float, steps: int) -> Tensor:
    """One sample after the other, every formula written out."""
    results = []
    for image, label, current in zip(x, y, start, strict=True):
        for _ in range(steps):
            leaf = current.clone().requires_grad_()
            F.cross_entropy(net(leaf[None]), label[None]).backward()
            moved = current + alpha * leaf.grad / leaf.grad.pow(2).sum().sqrt()
            delta = moved - image
            length = delta.pow(2).sum().sqrt()
            if length > eps:
                delta = delta / length * eps
            current = (image + delta).clamp(0, 1)
        results.append(current)
    return torch.stack(results)


@pytest.mark.parametrize("start", ["clean", "random"])
def test_l2_equals_the_loop_written_here(task, monkeypatch, start):
    net, x, y = task
    begin = x if start == "clean" else (x + 0.02 * torch.randn(x.shape)).clamp(0, 1)
    monkeypatch.setattr("robustdist.attacks.problem.random_start", lambda *_: begin)
    attack = PGD(norm="l2", eps=1, step_size=0.3, steps=6, random_start=start == "random")
    x_adv = attack(net, x, y)
    torch.testing.assert_close(x_adv, naive_l2_pgd(net, x, y, begin, 1.0, 0.3, 6), rtol=0, atol=1e-5)
    lengths = (x_adv - x).flatten(1).norm(dim=1)
    assert float(lengths.max()) > 0.5


def test_fgsm_is_one_signed_step_from_the_clean_image(task):
    net, x, y = task
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(net(leaf), y, reduction="sum"), leaf)
    expected = (x + EPS * grad.sign()).clamp(0, 1)
    torch.testing.assert_close(FGSM(eps=EPS)(net, x, y), expected, rtol=0, atol=1e-7)
    smaller = (x + 0.02 * grad.sign()).clamp(0, 1)
    torch.testing.assert_close(FGSM(eps=EPS, step_size=0.02)(net, x, y), smaller, rtol=0, atol=1e-7)


def test_margin_loss_is_best_other_logit_minus_own(task):
    net, x, y = task
    leaf = x.clone().requires_grad_()
    logits = net(leaf)
    total = sum(max(row[k] for k in range(5) if k != label) - row[label] for row, label in zip(logits, y, strict=True))
    (grad,) = torch.autograd.grad(total, leaf)
    expected = (x + EPS * grad.sign()).clamp(0, 1)
    torch.testing.assert_close(FGSM(eps=EPS, attack_loss="margin")(net, x, y), expected, rtol=0, atol=1e-7)


def test_never_differentiates_through_the_clamp():
    """A black pixel that was pushed below 0 follows its gradient again as soon as that turns round."""

    class TurnsRound(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dark, other = x[:, 0], x[:, 1]
            # the gradient of the dark pixel is negative until the other one has passed 0.55
            return torch.stack([torch.zeros_like(dark), 10 * other + dark * (other - 0.55)], dim=1)

    x, y = torch.tensor([[0.0, 0.5]]), torch.tensor([0])
    result = PGD(eps=0.1, step_size=0.03, steps=6, random_start=False).run(TurnsRound(), x, y)
    torch.testing.assert_close(result.x_adv, torch.tensor([[0.1, 0.6]]))
    assert not bool(result.no_gradient.any())


def test_costs_one_forward_per_step(task):
    net, x, y = task
    counts = []
    for attack in (FGSM(), PGD(steps=7), PGD(steps=3, restarts=2)):
        net.num_forwards = 0
        attack(net, x, y)
        counts.append(net.num_forwards)
    assert counts == [1, 7, 2 * (3 + 1)]


def test_default_step_size_reaches_every_corner_of_the_ball():
    assert PGD(eps="8/255", steps=10).step_size == pytest.approx(2.5 * 8 / 255 / 10)
    assert FGSM(eps="8/255").step_size == 8 / 255


# --- independence of the batch


@pytest.mark.parametrize(
    "attack",
    [
        PGD(eps=EPS, step_size=STEP, steps=3),
        PGD(eps=EPS, step_size=STEP, steps=2, restarts=3),
        PGD(norm="l2", eps=1, step_size=0.4, steps=3),
        PGD(norm="l1", eps=6, step_size=2, steps=3),
    ],
    ids=["linf", "restarts", "l2", "l1"],
)
def test_sample_ids_make_results_independent_of_the_batch(task, attack):
    net, x, y = task.net.double(), task.x[:6].double(), task.y[:6]
    ids = [40, 7, 7000000000, 3, 0, 12]

    def in_batches(order: list[int], size: int, **key: int) -> Tensor:
        result = torch.empty_like(x)
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            result[rows] = attack(net, x[rows], y[rows], sample_ids=[ids[row] for row in rows], **key)
        return result

    together = in_batches([0, 1, 2, 3, 4, 5], 6)
    for order, size in (([0, 1, 2, 3, 4, 5], 1), ([5, 2, 0, 4, 1, 3], 2), ([3, 1, 5, 0, 2, 4], 6)):
        result = in_batches(order, size, rank=size, step=first_step(order))
        torch.testing.assert_close(result, together, rtol=0, atol=1e-12)
        if attack.norm == "linf":
            assert torch.equal(result, together)
    assert not torch.equal(in_batches([0, 1, 2, 3, 4, 5], 6), attack(net, x, y, sample_ids=[i + 1 for i in ids]))


def first_step(order: list[int]) -> int:
    return 10 + order[0]


def test_equal_samples_in_a_batch_get_different_starts(task):
    net, x, y = task
    x, y = x[:1].repeat(4, 1, 1, 1), y[:1].repeat(4)
    attack = PGD(eps=EPS, step_size=0.001, steps=1)
    by_step, by_sample = attack(net, x, y), attack(net, x, y, sample_ids=[1, 2, 3, 1])
    assert len({tuple(row.flatten().tolist()) for row in by_step}) == 4
    assert len({tuple(row.flatten().tolist()) for row in by_sample}) == 3
    assert torch.equal(by_sample[0], by_sample[3])


def test_half_precision_gradients_do_not_shrink_with_the_batch():
    """The gradient of one sample is about 1e-6: divided by a batch size of 64 it would be 0 in float16."""
    signs = torch.randint(0, 2, (4, 16)) * 2.0 - 1.0
    net = nn.Linear(16, 4, bias=False)
    net.weight.data = signs * 1e-6
    net.half()
    x, y = torch.full((64, 16), 0.5, dtype=torch.float16), torch.arange(64) % 4
    attack = PGD(eps=0.25, step_size=0.125, steps=2, random_start=False)
    alone, inside = attack.run(net, x[:4], y[:4]), attack.run(net, x, y)
    assert torch.equal(alone.x_adv, inside.x_adv[:4])
    assert not bool(inside.no_gradient.any())
    assert bool(((alone.x_adv - x[:4]).abs().amax(1) == 0.25).all())


def test_loss_scale_saves_gradients_that_half_precision_drops():
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    for layer in net:
        nn.init.constant_(layer.weight, 3e-5)
        layer.weight.data[0] *= -1
    net.half()
    x, y = torch.full((2, 8), 0.5, dtype=torch.float16), torch.tensor([0, 1])
    attack = FGSM(eps=0.25)
    assert attack.run(net, x, y).no_gradient.tolist() == [True, True]
    scaled = attack.run(net, x, y, loss_scale=4096.0)
    assert scaled.no_gradient.tolist() == [False, False]
    assert bool(((scaled.x_adv - x).abs() == 0.25).all())


# --- restarts


@pytest.mark.parametrize("targeted", [False, True], ids=["untargeted", "targeted"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_restarts_are_never_worse(task, norm, targeted):
    net, x, y = task
    y = (y + 1) % 5 if targeted else y
    options = {"norm": norm, "eps": {"linf": 0.12, "l2": 1.2, "l1": 12}[norm], "steps": 1, "step_size": 0.01}

    def score(restarts: int) -> tuple[Tensor, Tensor]:
        x_adv = PGD(**options, restarts=restarts, targeted=targeted)(net, x, y)
        with torch.no_grad():
            logits = net(x_adv)
        losses = F.cross_entropy(logits, y, reduction="none")
        return (logits.argmax(1) == y) == targeted, -losses if targeted else losses

    success, losses = score(1)
    for restarts in (2, 6):
        more_success, more_losses = score(restarts)
        assert bool((more_success | ~success).all())
        assert bool((more_losses >= losses)[success == more_success].all())
        success, losses = more_success, more_losses
    assert bool((losses > score(1)[1]).any())


def test_restarts_rank_a_misclassified_sample_above_a_larger_loss():
    class Candidates(PGD):
        """Three ends: wrong with loss 0.70, still right with loss 1.09, wrong with loss 0.75."""

        def _descend(self, problem, restart):
            return torch.tensor([[0.1], [0.2], [0.3]])[restart].expand_as(problem.x)

    class Table(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.tensor([[1.0, 1.01, -9.0], [1.0, 0.99, 0.99], [1.0, 1.1, -9.0]])
            return rows[(x[:, 0] * 10 - 0.5).long()] + 0 * x

    x, y = torch.full((2, 1), 0.2), torch.tensor([0, 0])
    for restarts, best in ((1, 0.1), (2, 0.1), (3, 0.3)):
        x_adv = Candidates(eps=0.5, restarts=restarts)(Table(), x, y)
        torch.testing.assert_close(x_adv, torch.full_like(x, best))


# --- attacks that have nothing to follow


def test_overconfident_models_are_reported(task):
    net, x, y = task
    attack = PGD(eps=EPS, steps=3, random_start=False)
    for hopeless in (Scaled(net, 1e4), Scaled(net, 1e4, probabilities=True)):
        result = attack.run(hopeless.eval(), x, y)
        assert result.no_gradient.dtype == torch.bool
        assert result.no_gradient.tolist() == [True] * len(x)
        assert torch.equal(result.x_adv, x)
    assert attack.run(net, x, y).no_gradient.tolist() == [False] * len(x)
    # the margin loss sees through large logits
    margin = PGD(eps=EPS, steps=3, random_start=False, attack_loss="margin").run(Scaled(net, 1e4).eval(), x, y)
    assert margin.no_gradient.tolist() == [False] * len(x)


def test_only_the_samples_without_a_gradient_are_reported(task):
    net, x, y = task
    dead = torch.tensor([True, False] * 5)

    class Partly(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.where(dead[:, None], net(inputs.detach()), net(inputs))

    result = PGD(eps=EPS, steps=2, random_start=False).run(Partly(), x, y)
    assert torch.equal(result.no_gradient, dead)
    assert torch.equal((result.x_adv == x).flatten(1).all(1), dead)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_are_reported_and_do_no_harm(task, norm, bad):
    net, x, y = task
    x = x.clamp(0.4, 0.6)  # away from the box, which would hide an infinite step

    class SpoilsOnePixel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[0, 0, 0, 0] = bad
            return grad

    attack = PGD(norm=norm, eps={"linf": 0.1, "l2": 1, "l1": 5}[norm], steps=2, random_start=False)
    result = attack.run(net, x, y, forward=lambda images: net(SpoilsOnePixel.apply(images)))
    assert result.no_gradient.tolist() == [True] + [False] * 9
    assert bool(result.x_adv.isfinite().all())
    # the spoilt pixel stays, the rest of its image and the other images move as ever
    assert float(result.x_adv[0, 0, 0, 0]) == float(x[0, 0, 0, 0])
    assert float((result.x_adv[0] - x[0]).abs().max()) > 0.01
    assert torch.equal(result.x_adv[1:], attack(net, x, y)[1:])


def test_one_usable_step_is_enough_not_to_be_reported(task):
    net, x, y = task

    class DeadAtCall(nn.Module):
        def __init__(self, dead: int) -> None:
            super().__init__()
            self.dead, self.calls = dead, 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return net(inputs) * (0.0 if self.calls == self.dead else 1.0)

    attack = PGD(eps=EPS, steps=2, random_start=False)
    for dead in (1, 2):
        assert attack.run(DeadAtCall(dead), x, y).no_gradient.tolist() == [False] * len(x)
    assert FGSM(eps=EPS).run(DeadAtCall(1), x, y).no_gradient.tolist() == [True] * len(x)
