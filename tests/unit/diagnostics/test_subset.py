"""The images of an examination: which they are, and verdicts on them against a loop over single images."""

from __future__ import annotations

import itertools

import pytest
import torch

from robustdist.attacks import PGD, TorchAttack
from robustdist.core.ranks import gathered
from robustdist.core.testing import run_ranks, toy_images
from robustdist.diagnostics import Part, Subset, diagnose, examine
from robustdist.diagnostics.collect import Collector
from robustdist.diagnostics.examine import _judge
from robustdist.diagnostics.surrogate import distilled
from robustdist.diagnostics.threat import Threat
from robustdist.evaluation import RobustTally
from robustdist.report import Check

ATTACKS = {"pgd": PGD(eps=0.1, steps=3)}


def alone(value):
    return [value]


def subset_of(net, x, y, batch_size=7, **changes) -> Subset:
    options = {"ids": list(range(len(x))), "held": torch.ones(len(x), dtype=torch.bool)}
    options |= {"own": torch.ones(len(x), dtype=torch.bool), **changes}
    return Subset(net, [Part(net, x, y, **options)], batch_size)


def naive(net, x, y, attack):
    verdicts = []
    for row in range(len(x)):
        image, label = x[row : row + 1], y[row : row + 1]
        right = int(net(image).argmax()) == int(label)
        verdicts.append(right and int(net(attack(net, image, label, sample_ids=[row])).argmax()) == int(label))
    return verdicts


def test_verdicts_equal_a_loop(toy):
    net, x, y = toy
    attack = PGD(eps=0.12, steps=3)
    expected = naive(net, x, y, attack)
    assert 0 < sum(expected) < int((net(x).argmax(1) == y).sum()) < len(x)
    assert subset_of(net, x, y).verdicts(attack).tolist() == expected
    own = torch.arange(40) % 3 == 1
    assert subset_of(net, x, y, own=own).verdicts(attack).tolist() == expected[1::3]
    among = torch.arange(len(expected[1::3])) % 2 == 0
    found = subset_of(net, x, y, own=own).verdicts(attack, among=among).tolist()
    assert found == [verdict and chosen for verdict, chosen in zip(expected[1::3], among.tolist(), strict=True)]


def test_a_whole_batch_stays_whole(toy):
    net, x, y = toy
    lengths = []

    def forward(inputs):
        lengths.append(len(inputs))
        return net(inputs)

    attack = PGD(eps=0.12, steps=3)
    part = Part(forward, x, y, list(range(40)), torch.ones(40, dtype=torch.bool), torch.arange(40) % 4 == 0, whole=True)
    assert Subset(net, [part], 7).verdicts(attack).tolist() == naive(net, x, y, attack)[::4]
    assert set(lengths) == {40}


def test_missing_gradients_are_counted_per_image(toy):
    net, x, y = toy
    blind = torch.nn.Sequential(net)
    blind.forward = lambda inputs: torch.where(
        torch.arange(len(inputs))[:, None] < 1, net(inputs).detach(), net(inputs)
    )
    found = subset_of(blind, x, y, batch_size=40).without_gradient(PGD(eps=0.1, steps=1))
    right = (net(x).argmax(1) == y).tolist()
    assert found.tolist() == [place == right.index(True) for place in range(40)]


@pytest.mark.parametrize(
    ("length", "max_samples", "wanted"), [(1000, None, 200), (1000, 300, 200), (50, None, 200), (7, 3, 2)]
)
def test_images_are_spread_evenly(length, max_samples, wanted):
    collector = Collector([length], max_samples, wanted)
    counted = length if max_samples is None else min(length, max_samples)
    chosen = [place for place in range(counted) if collector.wants(0, place)]
    assert len(chosen) == min(wanted, counted)
    gaps = {after - before for before, after in itertools.pairwise(chosen)}
    assert gaps <= {max(1, counted // wanted)}
    assert not collector.wants(0, None)


def test_several_loaders_share_the_subset_and_an_unknown_length_takes_the_first():
    collector = Collector([100, 300], None, 40)
    chosen = [(loader, place) for loader, length in enumerate((100, 300)) for place in range(length)]
    chosen = [key for key in chosen if collector.wants(*key)]
    assert [sum(loader == which for loader, _ in chosen) for which in (0, 1)] == [10, 30]
    unknown = Collector([None], None, 5)
    assert [place for place in range(20) if unknown.wants(0, place)] == [0, 1, 2, 3, 4]


def collected(net, x, y, rank, world_size, wanted=12):
    tally = RobustTally(ATTACKS)
    collector = Collector([len(x)], None, wanted)
    for rows in torch.arange(rank, len(x), world_size).split(5):
        tally.update(net, net, x[rows], y[rows], rows.tolist())
        collector.keep(net, x[rows], y[rows], rows.tolist(), 0, False)
    return tally, collector


def test_the_collected_subset_knows_the_verdicts_of_the_evaluation(toy):
    net, x, y = toy
    tally, collector = collected(net, x, y, 0, 1)
    tally.reduce(alone)
    subset = collector.subset(net, tally.records, ATTACKS, 0, 1, alone)
    (part,) = subset.parts
    places = list(range(0, 36, 3))
    assert part.ids == places
    assert torch.equal(part.x, x[places])
    assert part.held.tolist() == tally.records.robust[places].tolist()
    assert subset.batch_size == 5


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_come_to_one_diagnosis(toy, world_size):
    net, x, y = toy

    def work(rank):
        tally, collector = collected(net, x, y, rank, world_size)
        tally.reduce(gathered)
        subset = collector.subset(net, tally.records, ATTACKS, rank, world_size, gathered)
        found = examine(subset, ATTACKS, gathered)
        return found.checks, found.curves

    tally, collector = collected(net, x, y, 0, 1)
    tally.reduce(alone)
    single = examine(collector.subset(net, tally.records, ATTACKS, 0, 1, alone), ATTACKS, alone)
    assert run_ranks(work, world_size) == [(single.checks, single.curves)] * world_size
    assert [point.num_samples for point in single.curves["eps"]] == [12] * len(single.curves["eps"])


def test_curves_begin_and_end_where_they_must(toy):
    net, x, y = toy
    result = diagnose(net, x, y, {"pgd": PGD(eps=0.1, steps=10)}, check_samples=20)
    eps, steps, restarts = (result.curves[name] for name in ("eps", "steps", "restarts"))
    assert [point.value for point in eps] == pytest.approx([0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.5])
    assert eps[0].num_right == int((net(x[::2]).argmax(1) == y[::2]).sum())
    assert [point.value for point in steps] == [1, 2, 5, 10, 20, 50]
    assert next(point for point in eps if point.value == 0.1).num_right == steps[4].num_right
    assert [point.value for point in restarts] == [1, 2, 5]
    assert restarts[0].num_right >= restarts[1].num_right >= restarts[2].num_right
    naive_step = naive(net, x[::2], y[::2], PGD(eps=0.1, steps=2, step_size=0.025, random_start=False))
    assert steps[1].num_right == sum(naive_step)


@pytest.mark.parametrize(
    ("norm", "eps", "bounds", "largest"),
    [
        ("linf", 8 / 255, (0, 1), 0.5),
        ("linf", 0.6, (0, 1), 1.0),
        ("linf", 8, (0, 255), 127.5),
        ("l2", 0.5, (0, 1), 3.0),
        ("l1", 4.0, (0, 1), 18.0),
        # without a box: half the range of the images, or the whole
        ("linf", 0.1, None, 4.0),
        ("l2", 0.1, None, 24.0),
        ("linf", 5.0, None, 8.0),
        ("linf", 9.0, None, 9.0),
    ],
)
def test_the_largest_radius_spares_nobody(norm, eps, bounds, largest):
    threat = Threat.of({"a": PGD(norm=norm, eps=eps, bounds=bounds)})
    images = [torch.full((1, 1, 6, 6), -3.0), torch.zeros(0, 1, 6, 6), torch.full((2, 1, 6, 6), 5.0)]
    low, high = threat.span(images)
    assert (low, high) == ((-3.0, 5.0) if bounds is None else bounds)
    radii = threat.radii(36, low, high)
    assert radii[-1] == pytest.approx(largest)
    assert radii == sorted(set(radii))
    assert eps in radii


def test_without_a_box_the_radius_grows_until_the_attack_can_do_anything(toy):
    net, x, y = toy
    # a sixteenfold radius would still be nothing beside images of this range
    result = diagnose(net, x, y, {"pgd": PGD(eps=1e-3, steps=3, bounds=None)}, check_samples=40)
    assert result.curves["eps"][-1].value == pytest.approx(float(x.max() - x.min()) / 2)
    assert result.checks["larger_radius"].passed, result.checks["larger_radius"]


def test_only_attacks_with_one_threat_model_are_held_against_it(toy):
    net, x, y = toy
    attack = PGD(eps=0.02, steps=5)
    alone_ = diagnose(net, x, y, {"pgd": attack}, check_samples=40)
    # the last two are another threat model, the second one is not
    others = {"big": PGD(eps=0.4, steps=5), "l2": PGD(norm="l2", eps=3.0, steps=5)}
    mixed = diagnose(net, x, y, {"pgd": attack, "same": PGD(eps="1/50", steps=1), **others}, check_samples=40)
    assert mixed.robust_acc < alone_.robust_acc, "the example shows nothing"
    about = " (about linf radius 0.02; left out, being about another: big, l2)"
    for name in ("one_step", "larger_radius", "more_steps", "black_box", "transfer"):
        assert mixed.checks[name] == Check(alone_.checks[name].passed, alone_.checks[name].detail + about)


def verdicts_but(*wrong):
    right = torch.ones(200, dtype=torch.bool)
    right[list(wrong)] = False
    return right


@pytest.mark.parametrize("follows", [True, False])
def test_what_black_boxes_are_held_against(follows):
    # every attack breaks an image that no other breaks, so each one that is forgotten is seen
    columns = {name: verdicts_but() for name in ("clean", "one step", "black box", "transfer")}
    columns |= {f"steps {steps}": verdicts_but(1) for steps in (1, 2, 5, 10, 20, 50)} | {"eps 0": verdicts_but(2)}
    columns |= {f"restarts {count}": verdicts_but(3) for count in (1, 2, 5)}
    columns |= {"held": verdicts_but(4), "margin": verdicts_but(5)}
    columns |= {"no margin gradient": ~verdicts_but(), "no ce gradient": ~verdicts_but()}
    reference = PGD(eps=0.1)
    found = _judge(columns, Threat(reference, follows), [0.1])
    assert "more steps and restarts 98.5 %" in found.checks["more_steps"].detail  # without 1, 3 and 4
    for name in ("black_box", "transfer"):
        # without 1, 3 and 5, and without 4 if the evaluation itself has nothing but gradients
        white = "98.0" if follows else "98.5"
        assert f"the evaluation 99.5 %, all attacks with gradients {white} %" in found.checks[name].detail


def test_the_threat_is_that_of_the_first_attack_with_a_radius():
    attacks = {"zero": PGD(eps=0.0), "a": PGD(norm="l2", eps=1.0, mean=0.5, std=0.2, seed=5), "b": PGD(eps=0.1)}
    descent = Threat.of(attacks).descent(3, restart=2)
    assert (descent.norm, descent.eps, descent.mean, descent.std, descent.seed) == ("l2", 1.0, 0.5, 0.2, 7)
    assert Threat.of({"zero": PGD(eps=0.0)}) is None
    assert Threat.of({"a": PGD(attack_loss="margin")}).one_step().attack_loss == "margin"


def test_without_a_radius_or_images_nothing_is_run(toy, require):
    net, x, y = toy
    found = examine(subset_of(net, x, y), {"zero": PGD(eps=0.0)}, alone)
    assert set(found.checks.values()) == {Check(None, "no attack of the evaluation has a radius")}
    nothing = examine(Subset(net, [], 8), ATTACKS, alone)
    assert set(nothing.checks.values()) == {Check(None, "there was no image")}
    require("torchattacks")
    assert Threat.of({"cw": TorchAttack("CW", steps=2)}) is None


def test_random_search_is_left_out_where_it_does_not_fit(toy):
    net, x, y = toy
    result = diagnose(net, x, y, {"pgd": PGD(norm="l1", eps=2.0, steps=5)}, check_samples=10)
    assert result.checks["black_box"].passed is None
    assert "black_box" not in result.failed_checks
    assert result.checks["transfer"].passed is not None


@pytest.mark.slow
def test_the_substitute_learns_what_the_model_answers_and_not_the_labels(digits, robust):
    x, _, held_out = digits[0][:200], digits[1][:200], digits[2]
    wrong_labels = torch.zeros(200, dtype=torch.long)
    threat = Threat.of({"a": PGD(eps=0.1)})
    net = distilled(subset_of(robust, x, wrong_labels), threat)
    agree = (net(held_out).argmax(1) == robust(held_out).argmax(1)).float().mean()
    assert agree > 0.7
    before = torch.get_rng_state()
    again = distilled(subset_of(robust, x, wrong_labels), threat)
    assert torch.equal(net(held_out), again(held_out))
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_no_images_have_a_substitute_too():
    torch.manual_seed(0)
    net = torch.nn.Linear(36, 3).requires_grad_(False)
    x, _ = toy_images(30)
    x = x.flatten(1)
    result = diagnose(net, x, net(x).argmax(1), {"pgd": PGD(eps=0.02, steps=5)})
    assert result.checks["transfer"].passed
    assert result.checks["black_box"].passed is None
