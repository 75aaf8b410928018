"""Distributed adversarial training with samples that have no label, against its formula in double precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, TorchAttack
from robustdist.core.testing import TinyNet, run_ranks, toy_images
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT, PGDAT

EPS, STEP_SIZE, STEPS = 0.1, 0.04, 3
Y = torch.tensor([0, -1, 3, -1, 1, -1, 2])
LABELED, UNLABELED = [0, 2, 4, 6], [1, 3, 5]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()


def images() -> Tensor:
    x = torch.rand(7, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[0, 0, 0] = 0.0  # the box is felt
    return x


def attack(**options) -> PGD:
    return PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, random_start=False, **options)


def climbed(value, x: Tensor) -> Tensor:
    """Signed steps up ``value``, which sums over the batch."""
    return from_start(value, x, x)


def from_start(value, start: Tensor, x: Tensor) -> Tensor:
    x_adv = start.clone()
    for _ in range(STEPS):
        x_adv.requires_grad_(True)
        grad = torch.autograd.grad(value(x_adv), x_adv)[0]
        x_adv = torch.maximum(torch.minimum(x_adv.detach() + STEP_SIZE * grad.sign(), x + EPS), x - EPS).clamp(0, 1)
    return x_adv


def nll(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return -net(x).softmax(1)[range(len(y)), y].log()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(1)


def by_hand(net: nn.Module, x: Tensor, y: Tensor, clean_weight: float, weight: float) -> Tensor:
    total = x.new_zeros(())
    known, unknown = x[y >= 0], x[y < 0]
    if len(known):
        labels = y[y >= 0]
        x_adv = climbed(lambda x: nll(net, x, labels).sum(), known)
        total = total + nll(net, x_adv, labels).mean() + clean_weight * nll(net, known, labels).mean()
    if len(unknown):
        guesses = net(unknown).argmax(1)
        x_adv = climbed(lambda x: nll(net, x, guesses).sum(), unknown)
        total = total + weight * nll(net, x_adv, guesses).mean()
    return total


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


ROWS = {"mixed": list(range(7)), "labelled": LABELED, "unlabelled": UNLABELED, "one of each": [2, 3]}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("clean_weight", "weight"), [(1.0, 1.0), (0.0, 0.5), (0.3, 2.0), (1.0, 0.0)])
def test_pseudo_labels_give_the_loss_and_gradient_of_the_formula(rows, clean_weight, weight):
    net, x, y = network(), images()[rows], Y[rows]
    loss = DAT(clean_weight, weight)(net, x, y, attack=attack())
    expected = by_hand(net, x, y, clean_weight, weight)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for own, grad in zip(gradients(net, loss), gradients(net, expected), strict=True):
        torch.testing.assert_close(own, grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("clean_weight", "weight"), [(1.0, 1.0), (0.0, 0.5), (0.3, 2.0)])
def test_the_divergence_gives_the_loss_and_gradient_of_the_formula(rows, clean_weight, weight):
    net, x, y = network(), images()[rows], Y[rows]
    # with the starts that the attack draws; they come from the attack itself, the rest is written out
    user = PGD(eps=EPS, step_size=STEP_SIZE, steps=STEPS, seed=5)
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.detach().clone(), torch.tensor(x.requires_grad)))
            return super().forward(x)

    watched = Watched(*net)
    loss = DAT(clean_weight, weight, "kl")(watched, x, y, attack=user)
    starts = [inputs for inputs, attacked in seen if attacked][::STEPS]

    total = x.new_zeros(())
    known, unknown, labels = x[y >= 0], x[y < 0], y[y >= 0]

    if len(known):
        x_adv = from_start(lambda x: nll(net, x, labels).sum(), starts.pop(0), known)
        total = total + nll(net, x_adv, labels).mean() + clean_weight * nll(net, known, labels).mean()
    if len(unknown):
        p = net(unknown).softmax(1).detach()
        x_adv = from_start(lambda x: kl(p, net(x).softmax(1)).sum(), starts.pop(0), unknown)
        total = total + weight * kl(p, net(x_adv).softmax(1)).mean()
    assert starts == []
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-10)
    for own, grad in zip(gradients(watched, loss), gradients(net, total), strict=True):
        torch.testing.assert_close(own, grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_labelled_and_unlabelled_starts_are_drawn_apart(mode):
    # the same image twice, once without label: were the streams one, its two starts would be one
    net = network()
    x = images()[:1].repeat(2, 1, 1, 1)
    seen: list[Tensor] = []

    class Watched(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                seen.append(x.detach().clone())
            return super().forward(x)

    DAT(unlabeled=mode)(Watched(*net), x, torch.tensor([2, -1]), attack=PGD(eps=EPS, steps=1))
    starts = torch.cat(seen)
    assert starts.shape == x.shape
    assert not torch.equal(starts[0], starts[1])


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_without_gaps_it_is_bit_for_bit_what_it_was(mode):
    x, y = toy_images(6)
    results = []
    for objective in (DAT(0.5, 3.0, mode), DAT(0.5)):
        torch.manual_seed(0)
        net = TinyNet(batch_norm=True)
        loss = objective(net, x, y, attack=PGD(eps=EPS, steps=2), rank=1, step=4)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in net.parameters()), net.norm.running_mean])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_the_order_of_the_samples_does_not_show(mode):
    net, x = network(), images()
    order = torch.tensor([3, 6, 0, 1, 5, 2, 4])
    losses = [
        DAT(0.5, 2.0, mode)(net, x[rows], Y[rows], attack=attack(attack_loss="margin"))
        for rows in (torch.arange(7), order)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)


def test_the_guess_is_that_of_the_model_in_eval_mode():
    torch.manual_seed(0)
    net = TinyNet(batch_norm=True, dropout=0.5).train()
    for _ in range(3):
        net(toy_images(16)[0])
    x, _ = toy_images(8, seed=3)
    given = []

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        given.append(y.clone())
        return F.cross_entropy(logits, y)

    DAT()(net, x, torch.full((8,), -1), attack=FGSM(eps=0.0, step_size=0.0), loss_fn=loss_fn)
    with torch.no_grad():
        expected = net.eval()(x).argmax(1)
    assert len(given) == 1
    assert torch.equal(given[0], expected)


@pytest.mark.parametrize("mode", ["pseudo", "kl"])
def test_the_ordinary_loss_never_sees_a_missing_label(mode):
    seen: list[Tensor] = []

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        seen.append(y)
        return F.cross_entropy(logits, y)

    DAT(unlabeled=mode)(network(), images(), Y, attack=attack(), loss_fn=loss_fn)
    assert [y.tolist() for y in seen[:2]] == [[0, 3, 1, 2]] * 2
    assert len(seen) == (3 if mode == "pseudo" else 2)
    assert all(bool((y >= 0).all()) for y in seen)


def test_the_target_of_the_divergence_is_a_constant():
    # at no perturbation the divergence is at its minimum: no gradient, also not through the clean prediction
    net = network()
    loss = DAT(unlabeled="kl")(net, images()[:2], torch.tensor([-1, -1]), attack=FGSM(eps=0.0, step_size=0.0))
    assert float(loss) == pytest.approx(0.0, abs=1e-12)
    assert all(float(grad.abs().max()) < 1e-12 for grad in gradients(net, loss))


@pytest.mark.parametrize("targets", [torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([[-1], [0], [1]])])
def test_only_integer_classes_can_be_missing(targets):
    x = images()[:3]
    user = PGD(eps=EPS, steps=1, attack_loss=lambda output, y: output.square().sum(1))
    loss_fn = lambda output, y: (output * y.double().view(3, -1)).square().mean()  # noqa: E731
    one, other = (objective(network(), x, targets, attack=user, loss_fn=loss_fn) for objective in (DAT(0.0), PGDAT()))
    assert torch.equal(one, other)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_batch_that_a_step_skips_is_skipped(skipped):
    calls = []

    class Skipping(DAT):
        def compute(self, context):
            ordinary = context.take

            def take(rows, y=None):
                part = ordinary(rows, y)
                loss = part.loss

                def counted(x):
                    calls.append(1)
                    return None if len(calls) == skipped + 1 else loss(x)

                part.loss = counted
                return part

            context.take = take
            return super().compute(context)

    with pytest.raises(AssertionError):  # without a Trainer nobody may skip
        Skipping()(network(), images(), Y, attack=attack())
    assert len(calls) == skipped + 1


def test_awp_around_it_uses_the_same_guesses_and_images_for_both_passes():
    net, x = network(), images()
    given: list[Tensor] = []
    shown: list[Tensor] = []

    class Watched(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled() and not x.requires_grad:
                shown.append(x)
            return super().forward(x)

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        given.append(y)
        return F.cross_entropy(logits, y)

    for mode, passes in (("pseudo", 3), ("kl", 3)):
        given.clear()
        shown.clear()
        objective = AWP(DAT(unlabeled=mode), gamma=2.0)  # far enough to change guesses
        objective(Watched(*net), x, Y, attack=attack(), loss_fn=loss_fn).backward()
        objective.after_backward()
        assert len(shown) == 2 * passes
        half = len(given) // 2
        assert all(torch.equal(a, b) for a, b in zip(given[:half], given[half:], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(shown[:passes], shown[passes:], strict=True))


def test_two_processes_average_what_each_has():
    def train(rank: int):
        net = nn.parallel.DistributedDataParallel(network())
        rows = ROWS["labelled"] if rank == 0 else ROWS["mixed"]
        DAT(0.5, 2.0)(net, images()[rows], Y[rows], attack=attack()).backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    ranks = run_ranks(train)
    expected = []
    for rows in (ROWS["labelled"], ROWS["mixed"]):
        net = network()
        expected.append(gradients(net, by_hand(net, images()[rows], Y[rows], 0.5, 2.0)))
    for own, other, one, two in zip(*ranks, *expected, strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, (one + two) / 2, rtol=0, atol=1e-10)


def test_the_first_batch_is_tried_with_guesses():
    logits = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 1.0]])
    y = torch.tensor([0, -1, -1])
    assert DAT().trial_targets(logits, y).tolist() == [0, 0, 1]
    assert AWP(DAT()).trial_targets(logits, y).tolist() == [0, 0, 1]
    full = torch.tensor([0, 1, 1])
    assert DAT().trial_targets(logits, full) is full


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DAT(unlabeled_weight=-1.0), "unlabeled_weight=-1.0 must be a finite number"),
        (lambda: DAT(unlabeled_weight=math.nan), "unlabeled_weight=nan must be a finite number"),
        (lambda: DAT(unlabeled="none"), "unlabeled='none' is unknown: choose pseudo or kl"),
        (lambda: DAT(unlabeled="kl").adapt(TorchAttack("PGD")), "has a loss of its own"),
    ],
)
def test_wrong_arguments_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()
