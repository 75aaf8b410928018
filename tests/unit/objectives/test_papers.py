"""Every published objective against its formula written once more with plain autograd, in double precision."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD
from robustdist.core.rng import Noise
from robustdist.errors import UsageError
from robustdist.objectives import AWP, FGSMRS, MART, NFGSM, TRADES, FastBAT, GradAlign, Objective
from robustdist.objectives.losses import kl_divergence, mart_loss

EPS, STEP_SIZE, STEPS = 0.1, 0.03, 3
SEED, RANK, STEP = 3, 1, 7
TOLERANCE = 1e-10

Loss = Callable[[nn.Module], Tensor]


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for num_in, num_out in itertools.pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


class ConvNet(nn.Module):
    """A convolution, a layer norm (weight of one dimension), a table (two dimensions, another name), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.norm = nn.LayerNorm(6)
        self.table = nn.Parameter(torch.eye(6) + 0.1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x).flatten(1)) @ self.table))


@pytest.fixture(params=["linear", "relu", "conv"])
def net(request) -> nn.Module:
    return {"linear": lambda: network(6, 4), "relu": lambda: network(6, 9, 4), "conv": lambda: ConvNet().double()}[
        request.param
    ]()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    x = torch.rand(5, 1, 2, 3, dtype=torch.float64)
    x[0, 0, 0], x[1, 0, 1] = 0.0, 1.0  # the box is felt
    return x, torch.tensor([0, 3, 1, 1, 2])


def noise() -> Noise:
    return Noise(SEED, RANK, STEP)


def in_ball(candidate: Tensor, x: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(candidate, x + EPS), x - EPS).clamp(0, 1)


def slope(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a scalar function, without a graph."""
    at = at.detach().clone().requires_grad_()
    return torch.autograd.grad(value(at), at)[0].detach()


def summed_ce(net: nn.Module, y: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: -net(x).softmax(1).log()[range(len(y)), y].sum()


def sign_steps(value: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the end of PGD with the start of TRADES and MART."""
    x_adv = in_ball(x + 0.001 * noise().normal(x, "start", 0), x)
    for _ in range(STEPS):
        x_adv = in_ball(x_adv + STEP_SIZE * slope(value, x_adv).sign(), x)
    return x_adv


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1)


def trades(x: Tensor, y: Tensor, beta: float) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        clean = net(x).softmax(1).detach()
        x_adv = sign_steps(lambda x_adv: kl(clean, net(x_adv).softmax(1)).sum(), x)
        p = net(x).softmax(1)
        return -p[range(len(y)), y].log().mean() + beta * kl(p, net(x_adv).softmax(1)).mean()

    return loss


def mart(x: Tensor, y: Tensor, beta: float) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        x_adv = sign_steps(summed_ce(net, y), x)
        total = x.new_zeros(())
        for p, q, label in zip(net(x).softmax(1), net(x_adv).softmax(1), y.tolist(), strict=True):
            others = torch.cat([q[:label], q[label + 1 :]])
            boosted = -q[label].log() - (1.0001 - others.max() + 1e-12).log()
            total = total + boosted + beta * (p * (p / q).log()).sum() * (1.0000001 - p[label])
        return total / len(y)

    return loss


def uniform_start(x: Tensor, radius: float, *tag: int | str) -> Tensor:
    return x + radius * (2 * noise().uniform(x, "start", *tag) - 1)


def one_step(net: nn.Module, x: Tensor, y: Tensor, factor: float) -> Tensor:
    start = in_ball(uniform_start(x, EPS, 0), x)
    return in_ball(start + factor * EPS * slope(summed_ce(net, y), start).sign(), x)


def fgsm_rs(x: Tensor, y: Tensor, factor: float) -> Loss:
    return lambda net: F.cross_entropy(net(one_step(net, x, y, factor)), y)


def n_fgsm(x: Tensor, y: Tensor, size: float, clip: bool = True) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        start = uniform_start(x, size * EPS)
        if clip:
            start = start.clamp(0, 1)
        return F.cross_entropy(net((start + EPS * slope(summed_ce(net, y), start).sign()).clamp(0, 1)), y)

    return loss


def grad_align(x: Tensor, y: Tensor, weight: float) -> Loss:
    def loss(net: nn.Module) -> Tensor:
        fixed = slope(summed_ce(net, y), x)
        noisy = in_ball(uniform_start(x, EPS, "align"), x).requires_grad_()
        moving = torch.autograd.grad(summed_ce(net, y)(noisy), noisy, create_graph=True)[0]
        cosines = [
            (a * b).sum() / (a * a).sum().sqrt() / (b * b).sum().sqrt() for a, b in zip(fixed, moving, strict=True)
        ]
        return fgsm_rs(x, y, 1.25)(net) + weight * (1 - torch.stack(cosines).mean())

    return loss


FORMULAS: list[tuple[Objective, Callable[[Tensor, Tensor], Loss]]] = [
    (TRADES(), lambda x, y: trades(x, y, 6.0)),
    (TRADES(beta=1.5), lambda x, y: trades(x, y, 1.5)),
    (MART(), lambda x, y: mart(x, y, 5.0)),
    (MART(beta=0.0), lambda x, y: mart(x, y, 0.0)),
    (FGSMRS(), lambda x, y: fgsm_rs(x, y, 1.25)),
    (FGSMRS(step_factor=0.6), lambda x, y: fgsm_rs(x, y, 0.6)),
    (NFGSM(), lambda x, y: n_fgsm(x, y, 2.0)),
    (NFGSM(noise=1.0), lambda x, y: n_fgsm(x, y, 1.0)),
    (NFGSM(clip_noise=False), lambda x, y: n_fgsm(x, y, 2.0, clip=False)),
    (GradAlign(), lambda x, y: grad_align(x, y, 0.2)),
    (GradAlign(weight=2.0), lambda x, y: grad_align(x, y, 2.0)),
]


def attack() -> PGD:
    # start and number of steps are for the objective to say, where its paper does
    return PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, seed=SEED)


def computed(objective: Objective, net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
    net.zero_grad()
    loss = objective(net, *batch, attack=attack(), rank=RANK, step=STEP)
    loss.backward()
    objective.after_backward()
    return loss.detach(), [parameter.grad.clone() for parameter in net.parameters()]


def assert_close(one: list[Tensor], other: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert bool(torch.isfinite(a).all())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("objective", "formula"), FORMULAS, ids=[repr(objective) for objective, _ in FORMULAS])
def test_loss_and_gradient_equal_the_formula(objective, formula, net, batch):
    loss, gradient = computed(objective, net, batch)
    expected = formula(*batch)(net)
    assert_close([loss], [expected.detach()])
    assert_close(gradient, list(torch.autograd.grad(expected, list(net.parameters()))))
    assert float(gradient[0].abs().max()) > 1e-3


# --- the two divergences


@pytest.mark.parametrize("term", ["kl", "mart"])
def test_more_classes_do_not_weaken_the_term(term):
    torch.manual_seed(0)
    clean, robust, y = torch.randn(4, 10).double(), torch.randn(4, 10).double(), torch.tensor([1, 0, 9, 3])

    def value(classes: int) -> Tensor:
        # classes that nobody expects, for both
        one, other = (F.pad(logits, (0, classes - 10), value=-60.0) for logits in (clean, robust))
        return kl_divergence(other, one) if term == "kl" else mart_loss(one, other, y, 5.0)

    assert float(value(10).min()) > 0.05
    for classes in (100, 1000):
        torch.testing.assert_close(value(classes), value(10), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("term", ["kl", "mart"])
def test_huge_logits_give_finite_values_and_gradients(term, dtype):
    clean = torch.tensor([[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0], [200.0, -200.0, -200.0]], dtype=dtype)
    robust, y = clean.flip(1).clone(), torch.tensor([0, 0, 1])
    clean.requires_grad_()
    robust.requires_grad_()
    value = kl_divergence(robust, clean) if term == "kl" else mart_loss(clean, robust, y, 5.0)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(torch.isfinite(value).all())
    value.sum().backward()
    for logits in (clean, robust):
        assert bool(torch.isfinite(logits.grad).all())
    assert float(robust.grad.abs().max()) > 0.1


def test_the_divergence_is_that_from_the_target():
    target, logits = torch.tensor([[0.0, 1.0, 3.0]]).double(), torch.tensor([[2.0, 0.0, 0.5]]).double()
    expected = kl(target.softmax(1), logits.softmax(1))
    torch.testing.assert_close(kl_divergence(logits, target), expected)
    assert abs(float(expected - kl(logits.softmax(1), target.softmax(1)))) > 0.05


# --- bi-level training


def step_length(grad: Tensor, step: float | str, factor: float) -> Tensor | float:
    if step == "paper":
        return 2000 / 255  # the radius here is above 8/255
    if step == "relative":
        return torch.stack([factor * EPS / row.abs().mean() for row in grad]).view(-1, 1, 1, 1)
    return float(step)


def linearisation_point(net: nn.Module, x: Tensor, y: Tensor, step: float | str, factor: float) -> Tensor:
    """Steps 1 and 2 of the released algorithm."""
    p, q = torch.clamp(-x, min=-EPS), torch.clamp(1 - x, max=EPS)
    z = torch.max(torch.min(EPS * (2 * noise().uniform(x, "start") - 1), q), p)
    grad = -slope(summed_ce(net, y), x + z)  # of the attack loss
    return torch.max(torch.min(z - step_length(grad, step, factor) * grad, q), p)


def released_sequence(
    net: nn.Module, x: Tensor, y: Tensor, step: float | str = "paper", factor: float = 2.0, lmbda: float = 10.0
) -> tuple[Tensor, list[Tensor], float]:
    """Steps 1 to 7 with two backward passes; also the share of coordinates inside the box."""
    parameters = list(net.parameters())
    p, q = torch.clamp(-x, min=-EPS), torch.clamp(1 - x, max=EPS)
    delta = linearisation_point(net, x, y, step, factor).requires_grad_()
    g2 = torch.autograd.grad(-F.cross_entropy(net(x + delta), y, reduction="sum"), delta, create_graph=True)[0]
    star = torch.max(torch.min(delta - step_length(g2, step, factor) * g2, q), p).detach()
    inside = (star > p + 1e-7) & (star < q - 1e-7)
    w = inside * slope(summed_ce(net, y), x + star) / lmbda
    cross = torch.autograd.grad(-(g2 * w).sum() / len(y), parameters, allow_unused=True, retain_graph=True)
    loss = F.cross_entropy(net(x + star), y, reduction="sum") / len(y)
    direct = torch.autograd.grad(loss, parameters)
    total = [d if c is None else d + c for d, c in zip(direct, cross, strict=True)]
    return loss.detach(), total, float(inside.double().mean())


@pytest.mark.parametrize("step", ["paper", "relative", 0.05, 0.5])
@pytest.mark.parametrize("weight", [0.1, 1.0, 0.0])
def test_fast_bat_has_the_gradient_of_the_released_sequence(net, batch, step, weight):
    _, gradient = computed(FastBAT(step, implicit_weight=weight), net, batch)
    lmbda = 1 / weight if weight else float("inf")
    _, expected, _ = released_sequence(net, *batch, step=step, lmbda=lmbda)
    assert_close(gradient, expected)


def test_the_released_sequence_has_both_parts(batch):
    net = network(6, 9, 4)
    _, both, inside = released_sequence(net, *batch, step=0.05)
    _, direct, _ = released_sequence(net, *batch, step=0.05, lmbda=float("inf"))
    assert 0.3 < inside < 1
    assert max(float((a - b).abs().max()) for a, b in zip(both, direct, strict=True)) > 1e-4


def test_the_constant_of_the_paper_depends_on_the_radius():
    steps = {eps: FastBAT("paper")._step(torch.ones(1), eps) for eps in (4 / 255, 8 / 255, 9 / 255, 16 / 255)}
    assert steps == {4 / 255: 5000 / 255, 8 / 255: 5000 / 255, 9 / 255: 2000 / 255, 16 / 255: 2000 / 255}


@pytest.mark.parametrize("sizes", [(6, 4), (6, 9, 4)], ids=["linear", "relu"])
@pytest.mark.parametrize("step", [0.01, 0.3], ids=["most inside", "some outside"])
def test_fast_bat_is_the_derivative_of_the_bilevel_loss(sizes, step, batch):
    # the weight of the implicit part is the step: then the loss is that of delta*(theta), from a fixed z
    net = network(*sizes)
    x, y = batch
    p, q = torch.clamp(-x, min=-EPS), torch.clamp(1 - x, max=EPS)
    z = linearisation_point(net, x, y, step, 2.0)
    _, gradient = computed(FastBAT(step, implicit_weight=step), net, batch)

    def bilevel() -> float:
        star = torch.max(torch.min(z + step * slope(summed_ce(net, y), x + z), q), p)
        with torch.no_grad():
            return float(F.cross_entropy(net(x + star), y))

    numeric = []
    for parameter in net.parameters():
        column = torch.zeros_like(parameter).flatten()
        for place in range(parameter.numel()):
            values = []
            for shift in (1e-6, -1e-6):
                parameter.data.view(-1)[place] += shift
                values.append(bilevel())
                parameter.data.view(-1)[place] -= shift
            column[place] = (values[0] - values[1]) / 2e-6
        numeric.append(column.view_as(parameter))
    assert_close(gradient, numeric, tolerance=1e-7)
    _, direct = computed(FastBAT(step, implicit_weight=0.0), net, batch)
    assert max(float((a - b).abs().max()) for a, b in zip(gradient, direct, strict=True)) > 1e-5


# --- weight perturbation


@pytest.mark.parametrize(
    ("base", "formula"), [(None, lambda x, y: fgsm_rs(x, y, 1.25)), (TRADES(), lambda x, y: trades(x, y, 6.0))]
)
@pytest.mark.parametrize("gamma", [0.01, 0.3])
def test_awp_takes_the_gradient_at_the_moved_weights(base, formula, gamma, batch):
    net = ConvNet().double()
    base = base if base is not None else FGSMRS()
    before = copy.deepcopy(net.state_dict())
    x, y = batch
    # the attack is that on the true weights
    true = copy.deepcopy(net)
    if isinstance(base, TRADES):
        clean = true(x).softmax(1).detach()
        x_adv = sign_steps(lambda x_adv: kl(clean, true(x_adv).softmax(1)).sum(), x)

        def outer(net: nn.Module) -> Tensor:
            p = net(x).softmax(1)
            return -p[range(len(y)), y].log().mean() + 6.0 * kl(p, net(x_adv).softmax(1)).mean()

    else:
        x_adv = one_step(true, x, y, 1.25)

        def outer(net: nn.Module) -> Tensor:
            return F.cross_entropy(net(x_adv), y)

    torch.testing.assert_close(outer(true), formula(x, y)(true))
    moved = copy.deepcopy(net)
    outer(true).backward()
    for name in ("conv.weight", "head.weight"):
        v, theta = true.get_parameter(name).grad, true.get_parameter(name).detach()
        moved.get_parameter(name).data.copy_(theta + gamma * theta.norm() / v.norm() * v)

    loss, gradient = computed(AWP(base, gamma), net, batch)

    assert_close([loss], [outer(moved).detach()])
    assert_close(gradient, list(torch.autograd.grad(outer(moved), list(moved.parameters()))))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_awp_moves_the_weights_and_nothing_else_until_the_backward_pass_is_over(batch):
    net = ConvNet().double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    objective = AWP(gamma=0.05)
    loss = objective(net, *batch, attack=attack())

    for name, value in net.state_dict().items():
        if name in ("conv.weight", "head.weight"):
            assert float((value - before[name]).norm() / before[name].norm()) == pytest.approx(0.05)
        else:
            assert torch.equal(value, before[name]), name
    loss.backward()
    objective.after_backward()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
def test_awp_leaves_frozen_weights_alone(batch, frozen):
    net = ConvNet().double()
    net.conv.weight.requires_grad_(not frozen)
    before = net.conv.weight.detach().clone()
    AWP(gamma=0.05)(net, *batch, attack=attack())
    assert torch.equal(net.conv.weight, before) == frozen


def test_awp_without_size_is_its_base_and_touches_nothing(batch):
    net = ConvNet().double()
    net.conv.weight.data[0, 0, 0, 0] = -0.0
    versions = [parameter._version for parameter in net.parameters()]
    results = [computed(objective, net, batch) for objective in (AWP(FGSMRS(), gamma=0.0), FGSMRS())]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))
    assert [parameter._version for parameter in net.parameters()] == versions


def test_awp_restores_at_the_next_call_what_an_exception_left(batch):
    net = ConvNet().double()
    before = copy.deepcopy(net.state_dict())
    objective = AWP(gamma=0.05)
    _, expected = computed(AWP(gamma=0.05), net, batch)
    objective(net, *batch, attack=attack(), rank=RANK, step=STEP)  # nobody calls backward
    assert not torch.equal(net.head.weight, before["head.weight"])
    _, gradient = computed(objective, net, batch)
    assert all(torch.equal(one, other) for one, other in zip(gradient, expected, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_awp_restores_when_the_second_pass_raises(batch):
    net = ConvNet().double()
    before = copy.deepcopy(net.state_dict())
    calls = []

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            assert not torch.equal(net.head.weight, before["head.weight"])
            raise ArithmeticError("on purpose")
        return F.cross_entropy(logits, y)

    with pytest.raises(ArithmeticError, match="on purpose"):
        AWP(gamma=0.05)(net, *batch, attack=attack(), loss_fn=loss_fn)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_awp_moves_the_weights_that_autocast_has_cast():
    net = network(6, 9, 4).float()
    x, y = torch.rand(5, 1, 2, 3), torch.tensor([0, 3, 1, 1, 2])

    def gradient(gamma: float) -> Tensor:
        net.zero_grad()
        objective = AWP(gamma=gamma)
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(net, x, y, attack=attack())
        loss.backward()
        objective.after_backward()
        return net[1].weight.grad.clone()

    assert float((gradient(0.5) - gradient(0.0)).abs().max()) > 1e-3


def test_awp_moves_nothing_by_a_gradient_that_overflowed():
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    x, y = torch.rand(5, 1, 2, 3), torch.tensor([0, 3, 1, 1, 2])
    AWP(gamma=0.05)(net, x, y, attack=attack(), loss_fn=lambda logits, y: F.cross_entropy(logits, y) * float("inf"))
    assert all(bool(torch.isfinite(value).all()) for value in net.state_dict().values())


def test_awp_counts_the_statistics_of_the_pass_that_is_trained_on(batch):
    x, y = batch
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(x.shape[1]), torch.nn.Flatten(), torch.nn.LazyLinear(5)).to(x.dtype)
    net(x)
    net[0].reset_running_stats()
    objective = AWP(gamma=0.1)
    objective(net, x, y, attack=PGD(eps=0.1, steps=1)).backward()
    objective.after_backward()
    assert int(net[0].num_batches_tracked) == 1


def test_awp_names_a_module_without_weights_to_move(batch):
    x, y = batch
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x[0].numel(), 5)).to(x.dtype)
    net[1].weight.requires_grad_(False)
    with pytest.raises(UsageError, match="the module has none: unfreeze some"):
        AWP()(net, x, y, attack=PGD(eps=0.1, steps=1))


@pytest.mark.parametrize(("progress", "moves"), [(0.1, False), (0.25, False), (0.26, True), (1.0, True)])
def test_awp_leaves_the_weights_where_they_are_during_its_warm_up(batch, progress, moves):
    objective = AWP(TRADES(), gamma=0.05, warm_up=0.25)
    assert objective.follows_progress
    net = ConvNet().double()
    before = net.conv.weight.detach().clone()
    loss = objective(net, *batch, attack=attack(), rank=RANK, step=STEP, progress=progress)
    assert torch.equal(net.conv.weight, before) != moves
    objective.after_backward()
    expected, _ = computed(AWP(TRADES(), gamma=0.05) if moves else TRADES(), net, batch)
    assert torch.equal(loss.detach(), expected)


@pytest.mark.parametrize("warm_up", [-0.1, 1.0, 10])
def test_a_warm_up_that_is_no_share_is_refused(warm_up):
    with pytest.raises(UsageError, match=r"10 of 200 epochs are 0\.05"):
        AWP(warm_up=warm_up)
