"""Counting clean and robust samples against a loop over single images, and the checks of the evaluation itself."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, Attack, AttackResult, Problem
from robustdist.core.testing import TinyNet, toy_images
from robustdist.errors import UsageError
from robustdist.evaluation import RobustTally
from robustdist.report import EvaluationResult

NUM_CLASSES = 4


class Echo(nn.Module):
    """The first pixels are the logits; counts its forwards."""

    def __init__(self, factor: float = 5.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.factor * x.flatten(1)[:, :NUM_CLASSES]


class Breaks(Attack):
    """Turns exactly the samples of the given ids into the class ``by`` later; notes what it is asked to attack."""

    def __init__(self, *ids: int, eps: float = 1.0, by: int = 1, **kwargs: Any) -> None:
        super().__init__(eps=eps, step_size=1.0, **kwargs)
        self.ids, self.by = set(ids), by
        self.asked: list[list[int]] = []

    def perturb(self, problem: Problem) -> Tensor:
        sample_ids = list(problem.noise.sample_ids)
        self.asked.append(sample_ids)
        problem.gradient(problem.x)
        broken = torch.tensor([sample_id in self.ids for sample_id in sample_ids])
        return torch.where(broken[:, None], problem.x.roll(self.by, -1), problem.x)


class Shifted(PGD):
    """An attack that cheats: what is returned is not what was projected."""

    def __init__(self, shift: Any, **kwargs: Any) -> None:
        super().__init__(steps=1, **kwargs)
        self.shift = shift

    def run(self, *args: Any, **kwargs: Any) -> AttackResult:
        found = super().run(*args, **kwargs)
        return AttackResult(found.x_adv + self.shift, found.no_gradient)


def images(classes: Sequence[int]) -> Tensor:
    """Images on which Echo answers with the given classes."""
    return 0.2 + 0.5 * F.one_hot(torch.tensor(classes), NUM_CLASSES).float()


def tally_of(
    attacks: dict[str, Attack], module: nn.Module, x: Tensor, y: Tensor, batch_size: int | None = None, **kwargs: Any
) -> RobustTally:
    tally = RobustTally(attacks, **kwargs)
    for rows in torch.arange(len(x)).split(batch_size or max(1, len(x))):
        tally.update(module, module, x[rows], y[rows], rows.tolist())
    return tally


def numbers(result: EvaluationResult) -> tuple:
    robust = {name: score.num_robust for name, score in result.attacks.items()}
    return result.num_samples, result.num_clean, result.num_robust, robust


def check(tally: RobustTally, name: str) -> bool:
    return tally.result().checks[name].passed


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Tensor, Tensor]:
    """A half-trained net in double precision: it gets some images wrong, and no attack decides on a rounding."""
    torch.manual_seed(1)
    net = TinyNet(batch_norm=True).double()
    x, y = toy_images(48, seed=1)
    x = x.double()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(net(x[:32]), y[:32]).backward()
        optimizer.step()
    net.zero_grad(set_to_none=True)
    return net.eval(), x, y


def attacks() -> dict[str, Attack]:
    return {
        "pgd": PGD(eps=0.03, steps=3),
        "far": PGD(eps=0.4, steps=1, step_size=0.001, seed=5),  # little more than its random start
        "l2": PGD(norm="l2", eps=0.15, steps=3),
        "fgsm": FGSM(eps=0.02),
    }


# --- counts


def test_counts_equal_a_loop_over_single_images(task):
    net, x, y = task
    clean, robust, held = 0, 0, dict.fromkeys(attacks(), 0)
    for i in range(len(x)):
        image, label = x[i : i + 1], y[i : i + 1]
        if int(net(image).argmax()) != int(label):
            continue
        clean += 1
        survived = []
        for name, attack in attacks().items():
            adversarial = attack(net, image, label, sample_ids=[i])
            survived.append(int(net(adversarial).argmax()) == int(label))
            held[name] += survived[-1]
        robust += all(survived)
    found = numbers(tally_of(attacks(), net, x, y).result())
    assert found == (len(x), clean, robust, held)
    assert 0 < robust < min(held.values()) <= max(held.values()) < clean < len(x), "the example shows nothing"


@pytest.mark.parametrize("batch_size", [1, 7, 48])
def test_counts_do_not_depend_on_the_batch_size(task, batch_size):
    assert numbers(tally_of(attacks(), *task, batch_size).result()) == numbers(tally_of(attacks(), *task, 5).result())


def test_counts_do_not_depend_on_the_order_of_the_attacks(task):
    backwards = dict(reversed(attacks().items()))
    assert numbers(tally_of(backwards, *task).result()) == numbers(tally_of(attacks(), *task).result())


def test_robust_means_under_every_attack_on_the_same_image():
    x, y = images([0, 1, 2, 3, 0, 1]), torch.tensor([0, 1, 2, 3, 0, 2])  # the last one is wrong already
    first, second = Breaks(0, 1, 5), Breaks(1, 2)
    result = tally_of({"a": first, "b": second}, Echo(), x, y).result()
    assert numbers(result) == (6, 5, 2, {"a": 3, "b": 3})
    assert (result.clean_acc, result.robust_acc, result.attack_acc("a")) == (5 / 6, 2 / 6, 3 / 6)
    # what is wrong already is not attacked; what one attack broke still is, so that every attack has its own number
    assert first.asked == second.asked == [[0, 1, 2, 3, 4]]


def test_a_batch_of_wrong_images_is_not_attacked():
    attack = Breaks()
    result = tally_of({"a": attack}, Echo(), images([0, 1]), torch.tensor([1, 2])).result()
    assert numbers(result) == (2, 0, 0, {"a": 0})
    assert attack.asked == []


def test_padding_is_neither_counted_nor_attacked():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    attack, module = Breaks(9), Echo()
    tally = RobustTally({"a": attack})
    tally.update(module, module, x, y, [7, None, 9, None])
    assert numbers(tally.result()) == (2, 2, 1, {"a": 1})
    assert attack.asked == [[7, 9]]
    tally.update(module, module, x, y, [None] * 4)
    assert numbers(tally.result()) == (2, 2, 1, {"a": 1})


def test_an_empty_batch_counts_nothing():
    tally, module = RobustTally({"a": PGD(steps=1)}), Echo()
    tally.update(module, module, images([0])[:0], torch.tensor([], dtype=torch.long), [])
    assert numbers(tally.result()) == (0, 0, 0, {"a": 0})
    assert tally.result().clean_acc == 0
    tally.update(module, module, images([2]), torch.tensor([2]), [0])
    assert numbers(tally.result())[:2] == (1, 1)


def test_a_radius_of_zero_leaves_the_clean_count(task):
    result = tally_of({"zero": PGD(eps=0.0, steps=2), "zero-l2": PGD(norm="l2", eps=0.0)}, *task).result()
    assert 0 < result.num_clean < result.num_samples
    assert result.num_robust == result.num_clean
    assert {score.num_robust for score in result.attacks.values()} == {result.num_clean}


def test_without_whole_batch_only_the_attacked_rows_are_forwarded():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 0, 2, 3])
    module = Echo()
    tally = RobustTally({"a": Breaks(3)})
    tally.update(module, module, x, y, [0, 1, 2, None])
    module.rows.clear()
    tally.update(module, module, x, y, [4, 5, 6, None])  # the second batch: no check of the outputs
    assert module.rows == [4, 2, 2], "all once, then the two right and counted ones in the attack and after it"


def test_with_whole_batch_all_rows_are_forwarded_and_the_same_are_counted():
    x, y = images([0, 1, 2, 3, 1]), torch.tensor([0, 0, 2, 3, 1])
    ids = [3, 4, None, 6, 7]
    results = []
    for whole_batch in (False, True):
        module, attack = Echo(), Breaks(6, 4, -1)

        def forward(x: Tensor, module: Echo = module, whole_batch: bool = whole_batch) -> Tensor:
            assert len(x) == 5 or not whole_batch
            return module(x)

        tally = RobustTally({"a": attack, "b": Breaks(7)}, num_examples=9)
        tally.update(module, forward, x, y, ids, whole_batch=whole_batch)
        results.append((numbers(tally.result()), tally.examples, tally.counts))
    (small, small_examples, small_counts), (whole, whole_examples, whole_counts) = results
    assert small == whole == (4, 3, 1, {"a": 2, "b": 2})
    assert torch.equal(small_counts, whole_counts)
    assert torch.equal(small_examples.x, whole_examples.x)
    assert small_examples.predicted == whole_examples.predicted == [0, 1, 3, 1]


def test_processes_add_up_to_the_whole(task):
    net, x, y = task
    whole = tally_of(attacks(), net, x, y, 8)
    parts = []
    for rank in range(3):
        tally = RobustTally(attacks())
        for start in (0, 8):
            rows = torch.arange(rank, len(x), 3)[start : start + 8]
            tally.update(net, net, x[rows], y[rows], rows.tolist())
        parts.append(tally)
    parts[2].mark_uncertain()
    parts[1].maxima[0] = 0.5
    counts, maxima = [part.counts.clone() for part in parts], [part.maxima.clone() for part in parts]

    def reduce(tensor: Tensor, operation: str) -> Tensor:
        everyone = counts if tensor.dtype == torch.int64 else maxima
        assert operation == ("sum" if tensor.dtype == torch.int64 else "max")
        stacked = torch.stack(everyone)
        return stacked.sum(0) if operation == "sum" else stacked.amax(0)

    results = []
    for part in parts:
        part.reduce(reduce)
        results.append(part.result())
    assert results[0] == results[1] == results[2]
    assert numbers(results[0]) == numbers(whole.result())
    assert torch.equal(parts[0].counts, whole.counts)
    assert [name for name, found in results[0].checks.items() if not found.passed] == ["budget", "counted_once"]
    seconds = [float(part[4]) for part in maxima]
    assert results[0].attacks["pgd"].seconds == pytest.approx(max(seconds))


# --- the module and the process are left alone


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_it_works_in_every_gradient_mode_and_leaves_the_module_as_it_was(task, context):
    net, x, y = task
    net = copy.deepcopy(net).train()
    statistics, rng = net.norm.running_mean.clone(), torch.get_rng_state()
    with context():
        result = tally_of(attacks(), net, x * 1.0, y + 0, 16).result()
    assert net.norm.training
    assert torch.equal(net.norm.running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert numbers(result) == numbers(tally_of(attacks(), *task).result())


def test_the_users_batch_is_not_written_to(task):
    net, x, y = task
    kept, labels = x.clone(), y.clone()
    tally_of(attacks(), net, x, y, num_examples=4)
    assert torch.equal(x, kept)
    assert torch.equal(y, labels)


# --- examples


def test_examples_show_the_first_attack_that_worked():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0])  # the last one is wrong already
    tally = tally_of({"a": Breaks(0), "b": Breaks(0, 1, by=2), "c": Breaks()}, Echo(), x, y, num_examples=10)
    found = tally.examples
    assert torch.equal(found.x, x)
    assert (found.y, found.predicted, found.predicted_adv) == ([0, 1, 2, 0], [0, 1, 2, 3], [1, 3, 2, 3])
    torch.testing.assert_close(found.x_adv, torch.stack([x[0].roll(1), x[1].roll(2), x[2], x[3]]))


def test_examples_show_the_first_attack_where_none_worked():
    moves = Shifted(0.01, eps=0.1, step_size=0, random_start=False)
    x = images([0])
    for named, shift in (({"a": moves, "b": Breaks()}, 0.01), ({"b": Breaks(), "a": moves}, 0.0)):
        found = tally_of(named, Echo(), x, torch.tensor([0]), num_examples=1).examples
        torch.testing.assert_close(found.x_adv, x + shift)


def test_only_as_many_examples_are_kept_as_asked_for():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    module = Echo()
    tally = RobustTally({"a": Breaks()}, num_examples=3)
    tally.update(module, module, x, y, [None, 1, None, 3])
    tally.update(module, module, x, y, [4, 5, 6, 7])
    assert tally.examples.y == [1, 3, 0]
    assert tally_of({"a": Breaks()}, Echo(), x, y).examples is None


def test_examples_are_in_pixel_units_and_on_the_cpu():
    pixels, y = images([0, 1]), torch.tensor([0, 1])
    attack = Breaks(0, mean=0.5, std=0.25)
    tally = tally_of({"a": attack}, Echo(), (pixels - 0.5) / 0.25, y, num_examples=2)
    torch.testing.assert_close(tally.examples.x, pixels)
    torch.testing.assert_close(tally.examples.x_adv[0], pixels[0].roll(1))


# --- checks: what must pass


def test_an_honest_evaluation_passes_every_check(task):
    checks = tally_of(attacks(), *task, 16).result().checks
    assert list(checks) == ["budget", "gradient", "logits", "deterministic", "counted_once"]
    assert [name for name, found in checks.items() if not found.passed] == []
    assert checks["counted_once"].detail.startswith("48 samples")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 255.0), None], ids=["unit", "bytes", "no-box"])
def test_honest_linf_attacks_keep_the_budget(bounds, dtype):
    scale = 255.0 if bounds == (0.0, 255.0) else 1.0
    x, y = toy_images(12)
    net = nn.Sequential(TinyNet()).to(dtype)
    net[0].conv.weight.data /= scale
    x = (x * scale).to(dtype)
    attack = PGD(eps=0.1 * scale, steps=2, bounds=bounds)
    with torch.no_grad():
        y = net(x).argmax(1)
    tally = tally_of({"a": attack}, net, x, y)
    assert check(tally, "budget")
    assert int(tally.counts[3]) == 12


@pytest.mark.parametrize(("norm", "eps"), [("linf", 4 / 255), ("l2", 3.0), ("l1", 12.0), ("l1", 800.0)])
def test_honest_attacks_keep_the_budget_on_large_images(norm, eps):
    # sums over 150,000 pixels in float32 are not exact
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(1e-3 * torch.randn(3 * 224 * 224, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.weight

    net, x = Large(), torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        y = net(x).argmax(1)
    tally = tally_of({"a": PGD(norm=norm, eps=eps, steps=5)}, net, x, y)
    assert check(tally, "budget"), tally.result().checks["budget"]
    assert int(tally.counts[3]) == 2


def test_dropout_and_batch_norm_are_no_randomness():
    net = TinyNet(batch_norm=True, dropout=0.5).train()
    x, y = toy_images(8)
    assert check(tally_of({"a": PGD(eps=0.01, steps=1)}, net, x, y), "deterministic")


# --- checks: what must be found


@pytest.mark.parametrize(
    ("shift", "kwargs"),
    [
        (0.01, {}),
        (-0.01, {"bounds": None}),
        (3e-6, {}),
        (0.01, {"norm": "l2"}),
        (0.03, {"norm": "l1"}),
        (math.nan, {}),
        (math.nan, {"bounds": None}),
        (math.nan, {"norm": "l1", "bounds": None}),
        (math.inf, {}),
        (-math.inf, {"norm": "l2", "bounds": None}),
    ],
    ids=str,
)
def test_a_broken_budget_is_found(shift, kwargs):
    eps = {"linf": 0.02, "l2": 0.04, "l1": 0.05}[kwargs.get("norm", "linf")]
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    for change, passes in ((0.0, True), (shift, False)):
        tally = tally_of({"a": Shifted(change, eps=eps, step_size=1, random_start=False, **kwargs)}, Echo(), x, y)
        assert check(tally, "budget") == passes


def test_one_bad_image_is_enough_and_is_not_forgotten():
    x, y = images([0, 1, 2, 3] * 2), torch.tensor([0, 1, 2, 3] * 2)
    module = Echo()
    shift = torch.zeros(4, NUM_CLASSES)
    shift[2, 1] = 0.05
    cheating, honest = Shifted(shift, eps=0.01), PGD(eps=0.01, steps=1)
    tally = RobustTally({"honest": honest, "cheating": cheating})
    tally.update(module, module, x[:4], y[:4], range(4))
    cheating.shift = 0.0
    tally.update(module, module, x[4:], y[4:], range(4, 8))
    assert not check(tally, "budget")
    assert "5.0e-02" in tally.result().checks["budget"].detail


def test_pixels_outside_the_box_are_found_even_inside_the_ball():
    x, y = images([0, 1]), torch.tensor([0, 1])
    x[0, 0] = 1.0
    for shift, passes in ((0.0, True), (0.1, False)):
        attack = Shifted(shift, eps=0.5, step_size=0.0, random_start=False)
        assert check(tally_of({"a": attack}, Echo(), x, y), "budget") == passes


@pytest.mark.parametrize("bounds", [(0.0, 1.0), None], ids=["box", "no-box"])
def test_images_that_are_no_numbers_are_found_without_a_radius(bounds):
    class Nowhere(Breaks):
        """Searches without a radius, and gets lost."""

        _has_eps = False

        def run(self, *args: Any, **kwargs: Any) -> AttackResult:
            found = super().run(*args, **kwargs)
            x_adv = found.x_adv.clone()
            x_adv[0, 0] = math.nan
            return AttackResult(x_adv, found.no_gradient)

    x, y = images([0, 1]), torch.tensor([0, 1])
    attack = Nowhere(eps=0.0, bounds=bounds)
    assert not check(tally_of({"a": attack}, Echo(), x, y), "budget")


def test_the_budget_is_measured_in_pixels():
    pixels, y = images([0, 1, 2]), torch.tensor([0, 1, 2])
    kwargs = {"eps": 0.02, "step_size": 0.01, "random_start": False, "mean": 0.5, "std": 0.1}
    for shift, passes in ((0.09, True), (0.11, False)):  # times 0.1, added to the step of 0.01
        away = shift * torch.ones(NUM_CLASSES)
        tally = tally_of({"a": Shifted(away, **kwargs)}, Echo(), (pixels - 0.5) / 0.1, y)
        assert check(tally, "budget") == passes


@pytest.mark.parametrize(("num_blind", "passes"), [(0, True), (1, True), (2, False), (100, False)])
def test_missing_gradients_are_found(num_blind, passes):
    class Confident(Echo):
        """So sure of images whose last pixel is white that cross-entropy has no gradient left."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e6 * (x.detach()[:, -1:] > 0.5))

    classes = [row % 3 for row in range(104)]
    x, y = images(classes), torch.tensor(classes)
    x = torch.cat([x, torch.zeros(104, 1)], 1)
    x[:num_blind, -1] = 1.0
    x[100:, -1], y[100:] = 1.0, (y[100:] + 1) % 3  # blind too, but wrong already
    tally = tally_of({"a": PGD(eps=0.01, steps=2), "b": PGD(eps=0.01, steps=1)}, Confident(), x, y, 8)
    assert tally.counts[3:5].tolist() == [200, 2 * num_blind]
    assert check(tally, "gradient") == passes
    assert tally.result().checks["gradient"].detail.startswith(f"{num_blind / 100:.1%} ")


def test_only_counted_rows_can_miss_their_gradient():
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0])
    module = Echo(factor=1e6)
    tally = RobustTally({"a": PGD(eps=0.01, steps=1)})
    tally.update(module, module, x, y, [0, None, 2, 3], whole_batch=True)
    assert tally.counts[3:5].tolist() == [2, 2]


def test_probabilities_are_found():
    class Softmax(Echo):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(1)

    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    for module, passes in ((Softmax(), False), (Echo(), True)):
        tally = tally_of({"a": PGD(eps=0.01, steps=1)}, module, x, y, 2)
        assert check(tally, "logits") == passes
        assert tally.result().checks["logits"].detail == f"the model returns {'logits' if passes else 'probabilities'}"


class Random(Echo):
    """A defence that hides behind noise."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        noise = {
            "torch": torch.randn(len(x), NUM_CLASSES),
            "python": torch.tensor(random.random()),
            "count": torch.tensor(1.0 / self.num_forwards),
            "dropout": F.dropout(torch.ones(len(x), NUM_CLASSES), 0.5, training=True),
            "none": torch.tensor(0.5),
        }[self.source]
        return super().forward(x) * (1 + 0.01 * noise)


@pytest.mark.parametrize("source", ["torch", "python", "count", "dropout", "none"])
def test_random_models_are_found(source):
    x, y = images([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    tally = tally_of({"a": PGD(eps=0.01, steps=1)}, Random(source), x, y, 2)
    assert check(tally, "deterministic") == (source == "none")
    assert tally.result().checks["deterministic"].detail.endswith("agree" if source == "none" else "differ")


def test_uncertain_sharding_is_found():
    tally = tally_of({"a": Breaks()}, Echo(), images([0]), torch.tensor([0]))
    assert check(tally, "counted_once")
    tally.mark_uncertain()
    assert not check(tally, "counted_once")


# --- the result


def test_the_result_says_what_was_done_and_fits_into_json(task):
    tally = tally_of({"pgd": PGD(eps="8/255", steps=2, seed=7), "fgsm": FGSM(eps="8/255")}, *task)
    result = tally.result()
    assert result.threat_model == {"norm": "linf", "eps": 8 / 255, "bounds": [0.0, 1.0]}
    assert result.seed == 7
    assert result.attacks["pgd"].settings == PGD(eps="8/255", steps=2, seed=7).settings()
    assert all(score.seconds > 0 for score in result.attacks.values())
    report = json.loads(json.dumps(result.to_dict()))
    assert report["num_samples"] == 48
    assert report["attacks"]["pgd"]["acc"] == result.attack_acc("pgd")
    assert EvaluationResult.from_dict(report) == result


@pytest.mark.parametrize(
    "other", [PGD(eps=0.2), PGD(norm="l2", eps=0.1), PGD(eps=0.1, bounds=(0, 2)), PGD(eps=0.1, bounds=None)]
)
def test_attacks_of_different_threat_models_are_called_mixed(other):
    tally = RobustTally({"a": PGD(eps=0.1), "b": PGD(eps=0.1, steps=3), "c": other})
    assert tally.result().threat_model == {"norm": "mixed", "eps": None, "bounds": None}


def test_the_attacks_are_those_at_the_start():
    named: dict[str, Attack] = {"a": Breaks()}
    tally = RobustTally(named)
    named["late"] = Breaks()
    assert list(tally.result().attacks) == ["a"]


# --- refused

X, Y = images([0, 1]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X * 255, Y, "bounds"),
        (X - 1, Y, "bounds"),
        (torch.full_like(X, math.nan), Y, "bounds"),
        (X, Y.float(), "class indices"),
        (X, F.one_hot(Y, NUM_CLASSES), "class indices"),
        (X, Y[:1], "class indices"),
        (X, torch.tensor([0, 4]), "4 classes"),
        (X, torch.tensor([-1, 0]), "4 classes"),
        (X, [0, 1], "class indices"),
        (X[:, None].expand(2, 3, 4), Y, None),
    ],
    ids=["bytes", "centred", "nan", "float-y", "one-hot", "short-y", "large-y", "negative-y", "list-y", "fits"],
)
def test_batches_that_do_not_fit_are_refused_before_anything_is_counted(x, y, words):
    tally, module = RobustTally({"a": Breaks(), "b": PGD(steps=1)}), Echo()
    before = [tally.counts.clone(), tally.maxima.clone()]
    if words is None:
        assert tally.check(module, module, x, y).shape == (2, NUM_CLASSES)
    else:
        for attempt in (
            lambda: tally.check(module, module, x, y),
            lambda: tally.update(module, module, x, y, [0, 1]),
        ):
            with pytest.raises(UsageError, match=words):
                attempt()
    assert torch.equal(tally.counts, before[0])
    assert torch.equal(tally.maxima, before[1])


def test_an_evaluation_without_attacks_is_refused():
    with pytest.raises(UsageError, match="attacks is empty"):
        RobustTally({})
