"""Free adversarial training against its algorithm written once more, over several batches."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD
from robustdist.core.testing import TinyNet, run_ranks, toy_images
from robustdist.errors import UsageError
from robustdist.objectives import AWP, FreeAT

EPS, LR = 0.1, 0.2


def two_layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).to(dtype)


def batches(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        x = torch.rand(size, 1, 2, 3, dtype=dtype, generator=generator)
        x[0, 0, 0] = 0.0  # the box is felt
        found.append((x, torch.randint(0, 4, (size,), generator=generator)))
    return found


def by_hand(net, data, replays, *, norm="linf", factor=1.0, size=None):
    """Return losses, gradients and perturbations of every step; SGD with rate LR."""
    size = size if size is not None else max(len(x) for x, _ in data)
    delta = torch.zeros(size, *data[0][0].shape[1:], dtype=data[0][0].dtype)
    found = []
    for x, y in data:
        for _ in range(replays):
            here = (x + delta[: len(x)]).clamp(0, 1).requires_grad_()
            loss = -net(here).log_softmax(1)[range(len(y)), y].mean()
            grads = torch.autograd.grad(loss, [here, *net.parameters()])
            for row in range(len(x)):
                g = grads[0][row]
                if norm == "linf":
                    delta[row] = (delta[row] + factor * EPS * g.sign()).clamp(-EPS, EPS)
                else:
                    moved = delta[row] + factor * EPS * g / g.norm()
                    delta[row] = moved * min(1.0, EPS / float(moved.norm()))
            with torch.no_grad():
                for parameter, grad in zip(net.parameters(), grads[1:], strict=True):
                    parameter -= LR * grad
            found.append((loss.detach(), list(grads[1:]), delta.clone()))
    return found


def by_objective(objective, net, data, **options):
    found = []
    for x, y in data:
        for _ in range(objective.replays):
            net.zero_grad()
            loss = objective(net, x, y, attack=PGD(eps=EPS, **options))
            loss.backward()
            objective.after_backward()
            grads = [parameter.grad.clone() for parameter in net.parameters()]
            with torch.no_grad():
                for parameter, grad in zip(net.parameters(), grads, strict=True):
                    parameter -= LR * grad
            found.append((loss.detach(), grads, objective.state_dict()["delta"].clone()))
    return found


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("factor", [1.0, 0.4])
def test_every_step_equals_the_algorithm(norm, factor):
    data = batches((5, 5, 3, 5))
    expected = by_hand(two_layers(), data, 3, norm=norm, factor=factor)
    found = by_objective(FreeAT(3, factor), two_layers(), data, norm=norm)
    assert len(found) == 12
    for (loss, grads, delta), (own_loss, own_grads, own_delta) in zip(expected, found, strict=True):
        torch.testing.assert_close(own_loss, loss, rtol=0, atol=1e-10)
        torch.testing.assert_close(own_delta, delta, rtol=0, atol=1e-10)
        for own, grad in zip(own_grads, grads, strict=True):
            torch.testing.assert_close(own, grad, rtol=0, atol=1e-10)
    # not one step is the ordinary one: the perturbation is there from the second on, across batches too
    assert all(bool(delta.abs().max() > 0.3 * EPS) for _, _, delta in found)


def test_a_larger_batch_is_filled_up_with_zeros():
    data = batches((2, 4))
    net, twin = two_layers(), two_layers()
    objective = FreeAT(1)
    by_objective(objective, net, data[:1])
    known = objective.state_dict()["delta"].clone()
    seen = []
    net.register_forward_hook(lambda module, args, output: seen.append(args[0].detach().clone()))
    by_objective(objective, net, data[1:])
    torch.testing.assert_close(seen[0][:2], (data[1][0][:2] + known).clamp(0, 1))
    assert torch.equal(seen[0][2:], data[1][0][2:])
    expected = by_hand(twin, data, 1, size=4)[-1]
    torch.testing.assert_close(objective.state_dict()["delta"], expected[2], rtol=0, atol=1e-10)


def test_a_smaller_batch_leaves_the_rest_alone():
    data = batches((4, 2))
    objective = FreeAT(2)
    states = by_objective(objective, two_layers(), data)
    assert torch.equal(states[-1][2][2:], states[1][2][2:])
    assert not torch.equal(states[-1][2][:2], states[1][2][:2])
    assert states[-1][2].shape == (4, 1, 2, 3)


def test_images_of_another_size_start_anew():
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    objective = FreeAT(1)
    seen = []
    net.register_forward_hook(lambda module, args, output: seen.append(args[0].detach().clone()))
    images = [torch.rand(3, 1, size, size) for size in (4, 6, 6)]
    for x in images:
        objective(net, x, torch.tensor([0, 1, 2]), attack=PGD(eps=EPS)).backward()
        objective.after_backward()
    assert torch.equal(seen[1], images[1])
    assert not torch.equal(seen[2], images[2])


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_perturbation_stays_in_ball_and_box(norm):
    data = batches((6, 4, 6, 2, 6))
    objective, net, seen = FreeAT(3, 0.7), two_layers(), []
    net.register_forward_hook(lambda module, args, output: seen.append(args[0].detach().clone()))
    by_objective(objective, net, data, norm=norm)
    order = {"linf": math.inf, "l2": 2}[norm]
    sizes = [(inputs - x).flatten(1).norm(order, dim=1).max() for inputs, x in zip(seen, repeated(data), strict=True)]
    assert 0.99 * EPS < max(map(float, sizes)) <= EPS + 1e-12
    assert all(0 <= float(inputs.min()) <= float(inputs.max()) <= 1 for inputs in seen)


def repeated(data):
    return [x for x, _ in data for _ in range(3)]


def test_pixels_are_those_before_normalisation():
    mean, std = 0.4, 0.25
    ((x, y),) = batches((5,))

    class Normalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = two_layers()

        def forward(self, x):
            return self.net((x - mean) / std)

    inside = by_objective(FreeAT(3), Normalising(), [(x, y)])
    outside = by_objective(FreeAT(3), two_layers(), [((x - mean) / std, y)], mean=mean, std=std)
    torch.testing.assert_close(inside[-1][2], outside[-1][2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_overflow_does_not_move_the_perturbation(norm, bad):
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double()
    ((x, y),) = batches((5,))
    objective = FreeAT(2)
    by_objective(objective, net, [(x, y)], norm=norm)
    before = objective.state_dict()["delta"].clone()
    # one infinite gradient on the way back: no sum of infinities makes a NaN of it
    attack = PGD(eps=EPS, norm=norm)
    objective(net, x, y, attack=attack, loss_fn=lambda logits, y: logits[:, 0].mean() * bad).backward()
    objective.after_backward()
    torch.testing.assert_close(objective.state_dict()["delta"], before, rtol=1e-12, atol=0)


def test_one_backward_pass_moves_the_perturbation_once():
    ((x, y),) = batches((5,))
    objective, net = FreeAT(1, 0.4), two_layers()
    objective(net, x, y, attack=PGD(eps=EPS)).backward()
    objective.after_backward()
    once = objective.state_dict()["delta"].clone()
    objective.after_backward()
    assert torch.equal(objective.state_dict()["delta"], once)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-16])
def test_the_scale_of_the_loss_does_not_show(scale):
    ((x, y),) = batches((5,))
    deltas = []
    for factor in (1.0, scale):
        objective, net = FreeAT(1), two_layers()
        loss = objective(net, x, y, attack=PGD(eps=EPS))
        (loss * factor).backward()
        objective.after_backward()
        deltas.append(objective.state_dict()["delta"])
    assert torch.equal(deltas[0], deltas[1])


def test_without_a_backward_pass_nothing_moves():
    net = two_layers()
    ((x, y),) = batches((5,))
    objective = FreeAT(1)
    objective(net, x, y, attack=PGD(eps=EPS))
    objective.after_backward()
    assert objective.state_dict() == {}
    by_objective(objective, net, [(x, y)])
    assert objective.state_dict()["delta"].abs().max() > 0
    objective.reset()
    assert objective.state_dict() == {}


def test_a_restored_objective_goes_on_where_it_was():
    data = batches((5, 3, 5))
    net = two_layers()
    first = FreeAT(2)
    by_objective(first, net, data[:2])
    state = pickle.loads(pickle.dumps(first.state_dict()))
    twin = two_layers()
    twin.load_state_dict(net.state_dict())
    second = FreeAT(2)
    second.load_state_dict(state)
    straight, resumed = by_objective(first, net, data[2:]), by_objective(second, twin, data[2:])
    for (loss, _, delta), (own_loss, _, own_delta) in zip(straight, resumed, strict=True):
        assert torch.equal(loss, own_loss)
        assert torch.equal(delta, own_delta)


def test_awp_around_it_moves_the_perturbation_once_per_step():
    data = batches((5,))
    net, twin = two_layers(), two_layers()
    wrapped = AWP(FreeAT(1), gamma=0.05)
    assert (wrapped.replays, wrapped.reads_backward, wrapped.state_is_per_rank) == (1, True, True)
    ((x, y),) = data
    loss = wrapped(net, x, y, attack=PGD(eps=EPS))
    loss.backward()
    wrapped.after_backward()
    # the gradient at the moved weights
    v = torch.autograd.grad(F.cross_entropy(twin(x), y), [twin[1].weight, twin[3].weight])
    with torch.no_grad():
        for parameter, grad in zip((twin[1].weight, twin[3].weight), v, strict=True):
            parameter += 0.05 * parameter.norm() / grad.norm() * grad
    x = x.clone().requires_grad_()
    expected = EPS * torch.autograd.grad(F.cross_entropy(twin(x), y), x)[0].sign()
    assert torch.equal(wrapped.state_dict()["delta"], expected)
    for name, value in net.state_dict().items():
        assert torch.equal(value, two_layers().state_dict()[name])


def test_two_processes_keep_a_perturbation_each():
    def train(rank: int):
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(TinyNet())
        objective = FreeAT(2)
        x, y = toy_images(8)
        mine = slice(4 * rank, 4 * rank + 4)
        for _ in range(2):
            net.zero_grad()
            objective(net, x[mine], y[mine], attack=PGD(eps=EPS)).backward()
            objective.after_backward()
        return objective.state_dict()["delta"], [parameter.grad.clone() for parameter in net.parameters()]

    (first, grads), (second, others) = run_ranks(train)
    assert all(torch.equal(one, other) for one, other in zip(grads, others, strict=True))
    # the weights did not move here, so each is that of a single process on its share
    torch.manual_seed(0)
    net = TinyNet()
    x, y = toy_images(8)
    for share, delta in ((slice(0, 4), first), (slice(4, 8), second)):
        objective = FreeAT(2)
        for _ in range(2):
            objective(net, x[share], y[share], attack=PGD(eps=EPS)).backward()
            objective.after_backward()
        assert torch.equal(objective.state_dict()["delta"], delta)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replays": 0}, "replays=0 must be a whole number"),
        ({"replays": 2.5}, "replays=2.5 must be a whole number"),
        ({"step_factor": 0.0}, "step_factor=0.0 must be positive"),
        ({"step_factor": math.inf}, "step_factor=inf must be positive"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        FreeAT(**arguments)
