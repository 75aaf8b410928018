"""TokenPGD against loops written here, and what it promises about padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import PGD, TokenPGD
from robustdist.core.rng import Noise
from robustdist.errors import UsageError

HIDDEN, CLASSES = 5, 3


class Reader(nn.Module):
    """Reads a masked sequence: attention over the real tokens, so that every token matters in its own way."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(hidden, 1), nn.Linear(hidden, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = self.score(x)[..., 0].masked_fill(~mask, torch.finfo(x.dtype).min).softmax(1)
        return self.head(torch.tanh((weights[..., None] * self.value(x)).sum(1)))


@dataclass
class Masked:
    """What an attack gets as ``forward``."""

    net: Reader
    mask: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.net(x, self.mask)


@pytest.fixture
def net() -> Reader:
    torch.manual_seed(0)
    return Reader()


def sequences(lengths: list[int], padded: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    """Tokens of very different lengths, and padding that is not zero."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randn(max(lengths), hidden, generator=generator) for _ in lengths]
    x = torch.full((len(lengths), padded, hidden), 7.0)
    mask = torch.zeros(len(lengths), padded, dtype=torch.bool)
    for row, length in enumerate(lengths):
        x[row, :length] = tokens[row][:length] * torch.linspace(0.2, 3, length)[:, None]
        mask[row, :length] = True
    return x, mask


LENGTHS = [4, 1, 6]
Y = torch.tensor([0, 2, 1])


def naive(
    net: Reader,
    x: Tensor,
    mask: Tensor,
    start: Tensor,
    *,
    eps: float,
    alpha: float,
    steps: int,
    per: str,
    relative: bool,
) -> Tensor:
    """One sample after the other without its padding, every token on its own, in double precision."""
    net.double()
    result = x.double().clone()
    for row in range(len(x)):
        real = mask[row].nonzero()[:, 0]
        clean = x[row, real].double()
        delta = start[row, real].double() - clean
        for _ in range(steps):
            leaf = (clean + delta).requires_grad_()
            logits = net(leaf[None], torch.ones(1, len(real), dtype=torch.bool))
            F.cross_entropy(logits, Y[row : row + 1]).backward()
            groups = [[token] for token in range(len(real))] if per == "token" else [list(range(len(real)))]
            for group in groups:
                unit = math.sqrt(float(clean[group].square().sum())) if relative else 1.0
                grad = leaf.grad[group]
                moved = delta[group] + alpha * unit * grad / math.sqrt(float(grad.square().sum()))
                length = math.sqrt(float(moved.square().sum()))
                delta[group] = moved * min(1.0, eps * unit / length)
        result[row, real] = clean + delta
    net.float()
    return result


@pytest.mark.parametrize("start", ["clean", "random"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_equals_the_loop_written_here(net, per, relative, start):
    x, mask = sequences(LENGTHS, 7)
    attack = TokenPGD(eps=0.3, step_size=0.12, steps=5, per=per, relative=relative, random_start=start == "random")
    begin = attack.problem(Masked(net, mask), x, Y, Noise(0)).start(0) if start == "random" else x
    x_adv = attack.run(net, x, Y, forward=Masked(net, mask)).x_adv
    expected = naive(net, x, mask, begin, eps=0.3, alpha=0.12, steps=5, per=per, relative=relative)
    torch.testing.assert_close(x_adv.double(), expected, rtol=0, atol=2e-6)
    assert float((x_adv - x).abs().max()) > 0.05
    # the ball was met, otherwise the projection was not tested
    assert float(attack.distance(x_adv, x, mask).max()) == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_gradients_at_padding_count_for_nothing(net, per):
    """A model that reads its padding too: the step has its whole length on the real tokens."""
    x, mask = sequences(LENGTHS, 7)

    class Careless(Masked):
        def __call__(self, x: Tensor) -> Tensor:
            return self.net(x, torch.ones_like(self.mask))

    attack = TokenPGD(eps=0.3, steps=1, step_size=0.1, per=per, random_start=False)
    x_adv = attack.run(net, x, Y, forward=Careless(net, mask)).x_adv
    assert torch.equal(x_adv[~mask], x[~mask])
    torch.testing.assert_close(attack.distance(x_adv, x, mask), torch.full((3,), 0.1), rtol=1e-4, atol=0)


def test_the_projection_puts_padding_back(net):
    x, mask = sequences(LENGTHS, 7)
    problem = TokenPGD(eps=0.3).problem(Masked(net, mask), x, Y, Noise(0))
    projected = problem.project(x + 1)
    assert torch.equal(projected[~mask], x[~mask])
    assert not torch.equal(projected[mask], x[mask])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_stays_in_its_balls_and_leaves_the_padding(net, per, relative, seed):
    x, mask = sequences(LENGTHS, 9)
    attack = TokenPGD(eps=0.4, steps=4, step_size=3.0, per=per, relative=relative, seed=seed)
    x_adv = attack.run(net, x, Y, forward=Masked(net, mask)).x_adv
    assert torch.equal(x_adv[~mask], x[~mask])
    delta, clean = (x_adv - x).double(), x.double().masked_fill(~mask[..., None], 0)
    dims = 2 if per == "token" else (1, 2)
    lengths = delta.square().sum(dims).sqrt()
    radii = 0.4 * (clean.square().sum(dims).sqrt() if relative else torch.ones_like(lengths))
    assert bool((lengths <= radii + 1e-6).all())
    assert bool((lengths[mask if per == "token" else ...] > 0).all())
    assert float(attack.distance(x_adv, x, mask).max()) <= 0.4 + 1e-6


def test_the_distance_is_that_of_the_worst_token_or_of_the_sequence():
    x = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]]])
    x_adv = x + torch.tensor([[[0.0, 1.0], [0.0, 0.5], [0.0, 0.0]]])
    distances = {
        (per, relative): float(TokenPGD(per=per, relative=relative).distance(x_adv, x))
        for per in ("token", "sequence")
        for relative in (True, False)
    }
    expected = {
        ("token", True): 0.5,
        ("token", False): 1.0,
        ("sequence", True): math.sqrt(1.25 / 26),
        ("sequence", False): math.sqrt(1.25),
    }
    assert distances == pytest.approx(expected)
    moved_from_zero = TokenPGD().distance(x + 1, x)
    assert bool(torch.isinf(moved_from_zero).all())  # a zero embedding has no room at all
    mask = torch.tensor([[False, True, True]])
    masked = TokenPGD(per="sequence").distance(x_adv, x, mask)
    assert float(masked) == pytest.approx(math.sqrt(1.25))  # the first token lends no length, but it has moved


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_the_start_is_uniform_in_the_ball(net, per):
    x, mask = sequences([2] * 3000, 3)
    attack = TokenPGD(eps=2.0, per=per, relative=False)
    y = torch.zeros(3000, dtype=torch.long)
    delta = (attack.problem(Masked(net, mask), x, y, Noise(3)).start(0) - x)[:, :2]
    lengths = delta.norm(dim=2).flatten() if per == "token" else delta.flatten(1).norm(dim=1)
    # the share of a ball's volume inside a radius is uniform
    dimension = HIDDEN if per == "token" else 2 * HIDDEN
    shares = ((lengths / 2.0) ** dimension).sort().values
    assert float((shares - torch.linspace(0, 1, len(shares))).abs().max()) < 0.04
    assert float(delta.mean().abs()) < 0.03
    # tokens of one row and rows are drawn independently
    correlation = torch.corrcoef(torch.cat([delta[:, 0, :2], delta[:, 1, :2]], 1).T)
    assert float((correlation - torch.eye(4)).abs().max()) < 0.08


@pytest.mark.parametrize("ids", [None, [5, 6, 7]], ids=["step", "sample"])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_padding_changes_nothing(net, per, ids):
    results = []
    for padded, shift in ((6, 0), (11, 0), (11, 4)):
        x, mask = sequences(LENGTHS, padded)
        x, mask = x.roll(shift, 1), mask.roll(shift, 1)  # padding on the left, as decoders have it
        found = TokenPGD(eps=0.4, per=per).run(net, x, Y, forward=Masked(net, mask), sample_ids=ids)
        results.append((found.x_adv - x)[mask])
    assert torch.equal(results[0], results[1]) or torch.allclose(results[0], results[1], atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("hidden", [1, 5, 16, 24])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_with_sample_ids_a_row_does_not_depend_on_its_company(per, hidden):
    torch.manual_seed(0)
    net = Reader(hidden)
    x, mask = sequences(LENGTHS, 6, hidden)
    attack = TokenPGD(eps=0.4, per=per)
    together = attack.problem(Masked(net, mask), x, Y, Noise(0, sample_ids=[5, 6, 7])).start(0)
    for row, length in enumerate(LENGTHS):
        own, alone = mask[row : row + 1, :length], x[row : row + 1, :length]
        start = attack.problem(Masked(net, own), alone, Y[:1], Noise(0, sample_ids=[5 + row])).start(0)
        torch.testing.assert_close(start[0], together[row, :length], rtol=1e-6, atol=1e-7)


def test_ranks_steps_and_restarts_start_elsewhere(net):
    x, mask = sequences(LENGTHS, 6)

    def start(tag: int = 0, **key: int) -> Tensor:
        return TokenPGD().problem(Masked(net, mask), x, Y, Noise(0, **key)).start(tag)

    starts = [start(), start(1), start(rank=1), start(step=1)]
    assert not any(torch.equal(a, b) for place, a in enumerate(starts) for b in starts[:place])
    assert torch.equal(start(), start())


def test_the_radius_follows_the_embeddings(net):
    """Twice the embeddings read by a model of half the weights: twice the perturbation."""
    x, mask = sequences(LENGTHS, 6)
    halved = Reader()
    halved.load_state_dict(net.state_dict())
    with torch.no_grad():
        halved.score.weight /= 2
        halved.value.weight /= 2
    delta = TokenPGD(eps=0.2).run(net, x, Y, forward=Masked(net, mask)).x_adv - x
    doubled = TokenPGD(eps=0.2).run(halved, 2 * x, Y, forward=Masked(halved, mask)).x_adv - 2 * x
    torch.testing.assert_close(doubled, 2 * delta, rtol=1e-4, atol=1e-6)


def test_a_zero_embedding_and_a_row_without_tokens_stay(net):
    x, mask = sequences(LENGTHS, 6)
    x[0, 1] = 0.0
    mask[1] = False
    found = TokenPGD(eps=0.5).run(net, x, Y, forward=Masked(net, mask))
    assert torch.isfinite(found.x_adv).all()
    assert torch.equal(found.x_adv[0, 1], x[0, 1])
    assert torch.equal(found.x_adv[1], x[1])


def test_tiny_gradients_give_whole_steps(net):
    x, mask = sequences(LENGTHS, 6)
    forward = Masked(net, mask)
    options: dict[str, Any] = {"eps": 0.3, "steps": 3, "random_start": False}
    strong = TokenPGD(**options, attack_loss=lambda logits, y: logits[:, 0])
    weak = TokenPGD(**options, attack_loss=lambda logits, y: 1e-25 * logits[:, 0])
    expected = strong.run(net, x, Y, forward=forward).x_adv
    torch.testing.assert_close(weak.run(net, x, Y, forward=forward).x_adv, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_keeps_the_dtype_and_the_ball(net, dtype):
    x, mask = sequences(LENGTHS, 6)
    net, x = net.to(dtype), x.to(dtype)
    attack = TokenPGD(eps=0.2)
    x_adv = attack.run(net, x, Y, forward=Masked(net, mask)).x_adv
    assert x_adv.dtype == dtype
    assert torch.equal(x_adv[~mask], x[~mask])
    assert float(attack.distance(x_adv, x, mask).max()) <= 0.2 + 1e-6


def test_restarts_and_margin_only_help(net):
    x, mask = sequences(LENGTHS, 6)

    def loss(**options: Any) -> Tensor:
        x_adv = TokenPGD(eps=0.3, **options).run(net, x, Y, forward=Masked(net, mask)).x_adv
        return F.cross_entropy(net(x_adv, mask), Y, reduction="none")

    clean = F.cross_entropy(net(x, mask), Y, reduction="none")
    once, often = loss(), loss(restarts=4)
    assert bool((once > clean).all())
    assert bool((often >= once - 1e-6).all())
    assert bool((loss(attack_loss="margin") > clean).all())


def test_schedules_scale_radius_and_step(net):
    x, mask = sequences(LENGTHS, 6)
    forward = Masked(net, mask)
    scaled = TokenPGD(eps=0.4, step_size=0.2).run(net, x, Y, forward=forward, eps_scale=0.5, step_scale=0.25)
    plain = TokenPGD(eps=0.2, step_size=0.05).run(net, x, Y, forward=forward)
    torch.testing.assert_close(scaled.x_adv, plain.x_adv)
    assert torch.equal(TokenPGD(eps=0).run(net, x, Y, forward=forward).x_adv, x)


def test_without_a_mask_all_tokens_move(net):
    x, mask = sequences([4, 4, 4], 4)
    assert bool(mask.all())
    unmasked = TokenPGD(eps=0.3).run(net, x, Y, forward=lambda x: net(x, mask)).x_adv
    assert torch.equal(unmasked, TokenPGD(eps=0.3).run(net, x, Y, forward=Masked(net, mask)).x_adv)


def test_what_it_is_shows_in_reports():
    shown = TokenPGD(eps="1/4", steps=5).settings()
    expected = {"attack": "TokenPGD", "eps": 0.25, "steps": 5, "step_size": 0.125, "per": "token", "relative": True}
    assert expected.items() <= shown.items()
    assert (TokenPGD().norm, TokenPGD().bounds) == ("l2", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "word"}, "per='word' is unknown: choose token or sequence"),
        ({"norm": "linf"}, "norm='linf'"),
        ({"steps": 0}, "steps=0"),
        ({"eps": -1}, "eps=-1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        TokenPGD(**options)


def test_inputs_that_are_no_sequences_are_refused(net):
    with pytest.raises(UsageError, match=r"not inputs of shape \(2, 3, 4, 4\).*Embeddings\(\)"):
        TokenPGD()(net, torch.rand(2, 3, 4, 4), Y[:2])
    x, mask = sequences(LENGTHS, 6)
    with pytest.raises(UsageError, match=r"forward.mask has shape \(3, 5\)"):
        TokenPGD().run(net, x, Y, forward=Masked(net, mask[:, :5]))


def test_pgd_without_bounds_bounds_the_whole_row(net):
    """The general attack works on embeddings too, with one ball for a row and its padding."""
    x, mask = sequences([4, 4, 4], 4)
    plain = PGD(norm="l2", bounds=None, eps=0.5, steps=3, step_size=0.4, random_start=False)
    token = TokenPGD(per="sequence", relative=False, eps=0.5, steps=3, step_size=0.4, random_start=False)
    forward = Masked(net, mask)
    expected = plain.run(net, x, Y, forward=forward).x_adv
    torch.testing.assert_close(token.run(net, x, Y, forward=forward).x_adv, expected)
