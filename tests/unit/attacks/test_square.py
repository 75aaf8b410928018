"""Square: draws per row, accepted proposals, budgets, and the schedule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import Square
from robustdist.attacks.losses import LOSSES
from robustdist.attacks.square_search import SquareEngine, patch_share
from robustdist.core.rng import Noise
from robustdist.errors import UsageError

EPS = 0.15


class Watched(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.net(x)


def test_the_schedule_halves_where_the_paper_says():
    shares = [patch_share(query) for query in range(10_000)]
    halvings = [query for query in range(1, 10_000) if shares[query] < shares[query - 1]]
    assert halvings == [11, 51, 201, 501, 1001, 2001, 4001, 6001, 8001]
    assert shares[-1] == 0.8 / 512
    assert [patch_share(query, queries=100) for query in (0, 1, 90)] == [0.8, 0.2, 0.8 / 512]


def test_linf_search_step_by_step(task):
    """One image by hand, from the row's single stream: stripes, then recoloured squares, kept if the margin falls."""
    net, x, y = task.net.double(), task.x[:1].double(), task.y[:1]
    queries, width, channels = 80, 8, 3
    attack = Square(eps=EPS, queries=queries, drop=False)
    per_query = 2 + channels
    length = channels * width + (queries - 1) * per_query
    draws = Noise(0, sample_ids=[17]).uniform(torch.empty(1, length), "square", 0)[0]
    low, high = (x - EPS).clamp(min=0), (x + EPS).clamp(max=1)
    margin = LOSSES["margin"]
    with torch.no_grad():
        best = torch.where(draws[: channels * width].view(1, channels, 1, width) >= 0.5, high, low)
        best_margin, worst = float(margin(net(best), y)), best
        for query in range(1, queries):
            u = draws[channels * width + (query - 1) * per_query :][:per_query]
            side = min(max(1, round(math.sqrt(patch_share(query, queries=queries) * 64))), 8)
            top, left = int(u[0] * (8 - side + 1)), int(u[1] * (8 - side + 1))
            candidate = best.clone()
            for channel in range(channels):
                source = high if u[2 + channel] >= 0.5 else low
                window = (0, channel, slice(top, top + side), slice(left, left + side))
                candidate[window] = source[window]
            value = float(margin(net(candidate), y))
            if value > best_margin or value > 0:
                best, best_margin = candidate, value
                worst = best
        found = attack(net, x, y, sample_ids=[17])
    torch.testing.assert_close(found, worst, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 2.0)])
def test_rows_do_not_depend_on_their_company(task, norm, eps):
    net, x, y = task.net.double(), task.x.double(), task.y
    attack = Square(norm=norm, eps=eps, queries=60)
    ids = list(range(40, 50))
    together = attack(net, x, y, sample_ids=ids)
    order = [8, 0, 5]
    apart = attack(net, x[order], y[order], sample_ids=[ids[row] for row in order])
    torch.testing.assert_close(apart, together[order], rtol=0, atol=1e-9)
    small = Square(norm=norm, eps=eps, queries=60, batch_size=3)(net, x, y, sample_ids=ids)
    torch.testing.assert_close(small, together, rtol=0, atol=1e-9)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 2.0), ("linf", 0.02)])
def test_looking_ahead_is_the_same_search_in_fewer_forward_passes(task, norm, eps, drop):
    """Restarts and searches of unequal age included; what is asked in vain stays below what is used."""
    net, x, y = task.net.double(), task.x[:4].double(), task.y[:4]
    common = {"norm": norm, "eps": eps, "queries": 150, "restarts": 2, "drop": drop, "batch_size": 24}
    plain, eager = Watched(net), Watched(net)
    expected = Square(**common)(plain, x, y)
    found = Square(look_ahead=True, **common)(eager, x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert len(eager.seen) < 0.7 * len(plain.seen)
    assert max(len(batch) for batch in eager.seen) <= 24
    assert sum(len(batch) for batch in eager.seen) < 2 * sum(len(batch) for batch in plain.seen)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.02), ("l2", 0.2)])
def test_every_query_is_inside_and_counted(task, norm, eps):
    net, x, y = task
    watched = Watched(net)
    attack = Square(norm=norm, eps=eps, queries=50, batch_size=5)
    x_adv = attack(watched, x, y)
    asked = watched.seen[2:]  # the first two forwards are on the clean images
    assert max(len(batch) for batch in asked) <= 5
    assert 10 * 30 < sum(len(batch) for batch in asked) <= 10 * 50
    for batch in asked:
        delta = (batch[:, None] - x[None]).flatten(2)
        lengths = delta.abs().amax(2) if norm == "linf" else delta.norm(dim=2)
        assert float(lengths.amin(1).max()) <= eps + 1e-6
        assert 0.0 <= float(batch.min()) <= float(batch.max()) <= 1.0
    margin = LOSSES["margin"]
    with torch.no_grad():
        assert bool((margin(net(x_adv), y) > margin(net(x), y)).all())


def test_l2_search_uses_the_whole_budget(task):
    net, x, y = task
    x_adv = Square(norm="l2", eps=1.0, queries=120)(net, x * 0.5 + 0.25, y)  # away from the box
    lengths = (x_adv - (x * 0.5 + 0.25)).flatten(1).norm(dim=1)
    assert float(lengths.min()) > 0.99


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.2), ("l2", 0.8)])
@pytest.mark.parametrize("shape", [(12,), (2, 9), (1, 4, 4), (1, 2, 2, 2)], ids=str)
def test_inputs_that_are_no_images(norm, eps, shape):
    generator = torch.Generator().manual_seed(0)
    size = math.prod(shape)
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, 3)).eval()
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(3, size, generator=generator))
        x = torch.rand(6, *shape, generator=generator)
        y = net(x).argmax(1)
        x_adv = Square(norm=norm, eps=eps, queries=100)(net, x, y)
        margin = LOSSES["margin"]
        assert bool((margin(net(x_adv), y) > margin(net(x), y)).all())


def test_it_sees_through_a_softmax_and_huge_logits(task):
    """Gradients are exactly zero here; margins are not."""
    net, x, y = task

    class Huge(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return (1e4 * net(images)).double()

    result = Square(eps=0.25, queries=60).run(Huge(), x, y)
    assert not bool(result.no_gradient.any())
    assert torch.equal(result.x_adv, Square(eps=0.25, queries=60)(net, x, y))


def test_later_restarts_see_survivors_only(task):
    net, x, y = task
    one, two = (Watched(net) for _ in range(2))
    survivors = int((net(Square(eps=0.3, queries=30)(one, x, y)).argmax(1) == y).sum())
    assert 0 < survivors < 10
    Square(eps=0.3, queries=30, restarts=2)(two, x, y)
    more = sum(len(batch) for batch in two.seen) - sum(len(batch) for batch in one.seen)
    assert more <= 30 * survivors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queries": 0}, "queries=0"),
        ({"p_init": 0.0}, "p_init=0.0 must be in"),
        ({"restarts": 1.5}, "restarts=1.5"),
        ({"norm": "l1"}, "norm='l1' has no square search"),
        ({"attack_loss": "ce"}, "compares margins"),
        ({"targeted": "x", "norm": "l3"}, "norm='l3' is unknown"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(UsageError, match=words):
        Square(**options)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.05), ("l2", 0.5)])
def test_draws_are_held_for_the_searches_at_hand_and_stay_those_of_their_rows(task, norm, eps, monkeypatch):
    sizes = []
    start = SquareEngine.start

    def watched(self, rows, group):
        items = start(self, rows, group)
        sizes.append(len(self._draws))
        return items

    monkeypatch.setattr(SquareEngine, "start", watched)
    options = {"norm": norm, "eps": eps, "queries": 12, "restarts": 4}
    net, x, ids = task.net.double(), task.x.double(), list(range(10))
    few = Square(batch_size=2, **options).run(net, x, task.y, sample_ids=ids)
    assert max(sizes) <= 4
    assert len(sizes) > 5
    sizes.clear()
    many = Square(batch_size=100, **options).run(net, x, task.y, sample_ids=ids)
    assert max(sizes) >= 20
    assert torch.equal(few.x_adv, many.x_adv)
