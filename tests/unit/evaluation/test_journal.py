"""An evaluation that was killed goes on where it was, and gives the same result."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from robustdist.core.ranks import gathered
from robustdist.core.testing import run_ranks
from robustdist.evaluation import RobustTally
from robustdist.evaluation.journal import Journal
from robustdist.report import EvaluationResult

from .support import Breaks, Echo, attacks, images, numbers

KEY = {"weights": "w", "attacks": "a", "data": "d"}
CLASSES = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
X, Y = images(CLASSES) + 0.001 * torch.arange(10)[:, None], torch.tensor([*CLASSES[:-1], 3])  # the last one is wrong


def alone(value):
    return [value]


def start(folder: Path, attack: Breaks, key=KEY, rank=0, num_examples=3, **options) -> RobustTally:
    journal = Journal(folder, key, rank, alone, **options)
    return RobustTally({"a": attack}, num_examples, journal)


def feed(tally: RobustTally, rows, x=X, y=Y, **options) -> None:
    module = Echo()
    for part in rows:
        tally.update(module, module, x[part], y[part], list(part), **options)


def timeless(result: EvaluationResult) -> EvaluationResult:
    return replace(
        result, attacks={name: replace(score, seconds=0.0, settings={}) for name, score in result.attacks.items()}
    )


def finished(tally: RobustTally) -> EvaluationResult:
    tally.reduce(alone)
    return timeless(tally.result())


def test_a_second_run_attacks_only_what_the_first_did_not(tmp_path):
    whole = start(tmp_path / "whole", Breaks(1, 5, 6))
    feed(whole, [range(10)])
    first = start(tmp_path / "killed", Breaks(1, 5, 6))
    feed(first, [range(4), range(4, 6)])  # and then it is gone, without a word
    attack = Breaks(1, 5, 6)
    second = start(tmp_path / "killed", attack)
    assert "6 finished images" in second.journal.message
    feed(second, [range(3), range(3, 8), range(8, 10)])
    assert attack.asked == [[6, 7], [8]]
    assert finished(second) == finished(whole)
    assert torch.equal(second.records.table, whole.records.table)
    for name in ("x", "x_adv"):
        assert torch.equal(getattr(second.examples, name), getattr(whole.examples, name))
    assert second.examples.predicted_adv == whole.examples.predicted_adv


def test_the_panel_is_completed_by_the_second_run(tmp_path):
    feed(start(tmp_path, Breaks(1)), [range(2)])
    second = start(tmp_path, Breaks(1))
    feed(second, [range(2), range(2, 10)])
    assert second.examples.y == [0, 1, 2]


@pytest.mark.parametrize("cut", [2, 5, 40, 200])
def test_a_torn_line_is_done_again(tmp_path, cut):
    feed(start(tmp_path, Breaks(1, 3)), [range(2), range(2, 5)])
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    attack = Breaks(1, 3)
    second = start(tmp_path, attack)
    feed(second, [range(10)])
    assert attack.asked == [[2, 3, 4, 5, 6, 7, 8]]
    third = start(tmp_path, again := Breaks(1, 3))
    feed(third, [range(10)])
    assert again.asked == []
    assert finished(third) == finished(second)
    assert finished(third).num_robust == 7


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1]", b"{}"])
def test_a_header_that_is_damaged_starts_afresh(tmp_path, content):
    feed(start(tmp_path, Breaks()), [range(4)])
    (tmp_path / "journal.json").write_bytes(content)
    second = start(tmp_path, attack := Breaks())
    feed(second, [range(4)])
    assert attack.asked == [[0, 1, 2, 3]]
    assert "starting afresh" in second.journal.message


@pytest.mark.parametrize("name", ["weights", "attacks", "data"])
def test_another_key_starts_afresh_and_says_why(tmp_path, name):
    feed(start(tmp_path, Breaks(1)), [range(4)])
    second = start(tmp_path, attack := Breaks(), key={**KEY, name: "other"})
    assert second.journal.message.endswith(f"with other {name}: starting afresh")
    feed(second, [range(4)])
    assert attack.asked == [[0, 1, 2, 3]]
    # what was there is gone: the first key finds nothing either
    third = start(tmp_path, attack := Breaks())
    feed(third, [range(4)])
    assert attack.asked == [[0, 1, 2, 3]]


def test_other_attacks_by_name_start_afresh(tmp_path):
    feed(start(tmp_path, Breaks(1)), [range(4)])
    tally = RobustTally({"b": Breaks()}, 0, Journal(tmp_path, KEY, 0, alone))
    assert tally.journal.message.endswith("with other columns: starting afresh")


def test_without_resume_nothing_is_read(tmp_path):
    feed(start(tmp_path, Breaks(1)), [range(4)])
    second = start(tmp_path, attack := Breaks(1), resume=False)
    feed(second, [range(4)])
    assert attack.asked == [[0, 1, 2, 3]]
    assert second.journal.message is None


def test_an_image_that_changed_is_attacked_again(tmp_path):
    feed(start(tmp_path, Breaks()), [range(4)])
    changed, labels = X.clone(), Y.clone()
    changed[1, 0] += 0.01
    labels[3] = 0
    second = start(tmp_path, attack := Breaks())
    feed(second, [range(4)], changed, labels)
    assert attack.asked == [[1]]  # the one with the new label is wrong now, so it is not attacked at all
    assert finished(second).num_clean == 3


def test_the_same_image_at_another_place_is_another_image(tmp_path):
    feed(start(tmp_path, Breaks()), [range(4)])
    second = start(tmp_path, attack := Breaks())
    module = Echo()
    second.update(module, module, X[:2], Y[:2], [7, 1])
    second.update(module, module, X[:2], Y[:2], [0, None], loader=1)
    assert attack.asked == [[7], [0]]


def test_with_the_whole_batch_a_batch_is_known_or_done_again(tmp_path):
    feed(start(tmp_path, Breaks(1)), [range(4)], whole_batch=True)
    second = start(tmp_path, attack := Breaks(1))
    feed(second, [range(4), range(2, 6)], whole_batch=True)
    assert attack.asked == [[2, 3, 4, 5]]
    second.reduce(alone)
    assert numbers(second.result()) == (6, 6, 5, {"a": 5})


def test_what_the_first_run_found_out_is_not_forgotten(tmp_path):
    first = start(tmp_path, Breaks())
    first.findings.excess = float("inf")
    first.mark_uncertain()
    feed(first, [range(4)])
    second = start(tmp_path, Breaks())
    assert finished(second).failed_checks == ["budget", "counted_once"]


def test_seconds_of_all_runs_add_up(tmp_path):
    runs = []
    for part in (range(4), range(4, 8)):
        tally = start(tmp_path, Breaks())
        feed(tally, [part])
        runs.append(tally._seconds["a"])
    last = start(tmp_path, Breaks())
    assert last.result().attacks["a"].seconds == pytest.approx(sum(runs))


def test_the_folder_goes_when_all_is_done(tmp_path):
    tally = start(tmp_path / "progress", Breaks())
    feed(tally, [range(4)])
    tally.journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_images_of_both_runs_are_kept_and_orphans_are_not(tmp_path):
    first = start(tmp_path, Breaks(1), save_images=True)
    feed(first, [range(3)])
    (tmp_path / "images-0-0-99.pt").write_bytes(b"written before a line that never came")
    second = start(tmp_path, Breaks(1), save_images=True)
    feed(second, [range(10)])
    parts = [torch.load(path, weights_only=True) for path in second.journal.image_files()]
    assert sorted(path.name for path in tmp_path.glob("images-*")) == ["images-0-0-0.pt", "images-1-0-0.pt"]
    assert torch.cat([part["id"] for part in parts]).tolist() == list(range(10))
    assert torch.cat([part["label"] for part in parts]).tolist() == Y.tolist()
    expected = X.clone()
    expected[1] = X[1].roll(1)
    torch.testing.assert_close(torch.cat([part["x_adv"] for part in parts]), expected)


def test_a_run_without_images_is_no_start_for_one_with(tmp_path):
    feed(start(tmp_path, Breaks()), [range(4)])
    second = start(tmp_path, attack := Breaks(), save_images=True)
    feed(second, [range(4)])
    assert attack.asked == [[0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2), (2, 1)])
def test_a_killed_run_goes_on_with_another_number_of_processes(tmp_path, task, before, after):
    net, x, y = task

    def work(rank: int, world_size: int, num_batches: int, folder: Path):
        tally = RobustTally(attacks(), 0, Journal(folder, KEY, rank, gathered))
        for rows in torch.arange(rank, len(x), world_size).split(4)[:num_batches]:
            tally.update(net, net, x[rows], y[rows], rows.tolist())
        if num_batches < 99:
            os.kill(os.getpid(), signal.SIGKILL)
        tally.reduce(gathered)
        return tally.journal.num_known, tally.records.table.tolist()

    (expected,) = run_ranks(lambda rank: work(rank, 1, 99, tmp_path / "whole"), 1)
    with pytest.raises(RuntimeError, match="exit status -9"):
        run_ranks(lambda rank: work(rank, before, 2, tmp_path / "killed"), before)
    lines = [line for path in (tmp_path / "killed").glob("*.jsonl") for line in path.read_text().split()]
    assert len(lines) == 2 * before
    assert sum(len(json.loads(line)["rows"]) for line in lines) == 8 * before
    for known, table in run_ranks(lambda rank: work(rank, after, 99, tmp_path / "killed"), after):
        assert known == 8 * before
        assert table == expected[1]
