"""Counting clean and robust samples against a loop over single images."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from robustdist.attacks import PGD
from robustdist.core.ranks import gathered
from robustdist.core.testing import run_ranks
from robustdist.evaluation import RobustTally

from .support import Breaks, Echo, attacks, images, numbers, tally_of

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
        results.append((numbers(tally.result()), tally.examples, tally.records.table))
    (small, small_examples, small_table), (whole, whole_examples, whole_table) = results
    assert small == whole == (4, 3, 1, {"a": 2, "b": 2})
    assert torch.equal(small_table, whole_table)
    assert torch.equal(small_examples.x, whole_examples.x)
    assert small_examples.predicted == whole_examples.predicted == [0, 1, 3, 1]


def counted_by(rank, world_size, net, x, y):
    tally = RobustTally(attacks())
    for rows in torch.arange(rank, len(x), world_size).split(8):
        tally.update(net, net, x[rows], y[rows], rows.tolist())
    return tally


def test_processes_add_up_to_the_whole(task):
    whole = counted_by(0, 1, *task)
    parts = [counted_by(rank, 3, *task) for rank in range(3)]
    parts[2].mark_uncertain()
    parts[1].findings.excess = 0.5
    everyone = []
    for part in parts:
        part.reduce(lambda value: everyone.append(value) or [value])
    slowest = max(seconds["pgd"] for _, _, seconds, _ in everyone)
    for part in parts:
        part.reduce(lambda _: everyone)
    results = [part.result() for part in parts]
    assert results[0] == results[1] == results[2]
    assert numbers(results[0]) == numbers(whole.result())
    assert torch.equal(parts[0].records.table, whole.records.table)
    assert results[0].failed_checks == ["budget", "counted_once"]
    assert results[0].attacks["pgd"].seconds == slowest


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_real_processes_have_the_same_records(task, world_size):
    def work(rank: int) -> tuple:
        tally = counted_by(rank, world_size, *task)
        tally.reduce(gathered)
        result = tally.result()
        return tally.records.table.tolist(), numbers(result), result.classes, result.waterfall

    whole = counted_by(0, 1, *task)
    expected = (
        whole.records.table.tolist(),
        numbers(whole.result()),
        whole.result().classes,
        whole.result().waterfall,
    )
    assert run_ranks(work, world_size) == [expected] * world_size


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
