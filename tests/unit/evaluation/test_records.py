"""The table of images: its counts, classes and waterfall against loops over single rows."""

from __future__ import annotations

import pytest
import torch

from robustdist.evaluation import Records
from robustdist.report import ClassScore, Step

from .support import Breaks, Echo, images, tally_of


class Staged(Breaks):
    """Says which of its stages broke a sample, as an ensemble does."""

    stages = ("first", "second", "third")

    def __init__(self, broken_by: dict[int, int], **kwargs) -> None:
        super().__init__(*broken_by, **kwargs)
        self.broken_by = broken_by

    def run(self, *args, sample_ids=(), **kwargs):
        found = super().run(*args, sample_ids=sample_ids, **kwargs)
        stage = torch.tensor([self.broken_by.get(sample_id, -1) for sample_id in sample_ids])
        return found._replace(stage=stage)


def random_records(seed: int) -> Records:
    generator = torch.Generator().manual_seed(seed)
    records = Records({"a": ("one", "two", "three"), "b": ()})
    rows = records.new_rows(60)
    rows[:, 1] = torch.randperm(60, generator=generator)
    rows[:, 3] = torch.randint(0, 5, (60,), generator=generator)
    rows[:, 4] = torch.where(torch.rand(60, generator=generator) < 0.8, rows[:, 3], 9)
    clean = rows[:, 3] == rows[:, 4]
    for name in ("a", "b"):
        held = (torch.rand(60, generator=generator) < 0.6) & clean
        rows[:, records.place(name, "held")] = held.long()
        if name == "a":
            stage = torch.randint(0, 3, (60,), generator=generator)
            rows[:, records.place(name, "stage")] = torch.where(clean & ~held, stage, -1)
    records.add(rows[:25])
    records.add(rows[25:])
    return records


@pytest.mark.parametrize("seed", range(5))
def test_every_summary_equals_a_loop_over_rows(seed):
    records = random_records(seed)
    rows = [dict(zip(records.columns, row, strict=True)) for row in records.table.tolist()]
    classes: dict[int, list[int]] = {}
    fall = dict.fromkeys(["clean", "a: one", "a: two", "a: three", "b"], 0)
    for row in rows:
        right = row["label"] == row["prediction"]
        robust = right and row["a/held"] and row["b/held"]
        counted = classes.setdefault(row["label"], [0, 0, 0])
        for place, value in enumerate((True, right, robust)):
            counted[place] += bool(value)
        # the step at which the image falls, if at any
        broken = None
        if not right:
            broken = "clean"
        elif not row["a/held"]:
            broken = f"a: {('one', 'two', 'three')[row['a/stage']]}"
        elif not row["b/held"]:
            broken = "b"
        for step in fall:
            if step == broken:
                break
            fall[step] += 1
    assert records.classes() == [ClassScore(label, *classes[label]) for label in sorted(classes)]
    assert records.waterfall() == [Step(name, number) for name, number in fall.items()]
    assert records.waterfall()[-1].num_robust == int(records.robust.sum()) == sum(c[2] for c in classes.values())
    assert len(records) == 60


def test_merging_sorts_and_counts_each_image_once():
    records = random_records(0)
    table = records.table
    shuffled = table[torch.randperm(60, generator=torch.Generator().manual_seed(1))]
    other = random_records(1).new_rows(2)
    other[:, 0], other[:, 1] = 1, torch.tensor([3, 0])  # another loader has ids of its own
    records.merge([shuffled[:40], other, shuffled[20:]])
    assert len(records) == 62
    assert torch.equal(records.table[:60], table[table[:, 1].argsort()])
    assert records.table[60:, :2].tolist() == [[1, 0], [1, 3]]
    before = records.table
    records.merge([before, before])
    assert torch.equal(records.table, before)


def test_no_images_have_no_classes():
    records = Records({"a": ()})
    records.merge([])
    assert (len(records), records.classes(), records.waterfall()) == (0, [], [Step("clean", 0), Step("a", 0)])


def test_the_waterfall_names_the_stage_that_broke_an_image():
    x, y = images([0, 1, 2, 3, 0, 1]), torch.tensor([0, 1, 2, 3, 0, 2])  # the last one is wrong already
    staged = Staged({0: 1, 3: 2, 5: 0})
    tally = tally_of({"one": Breaks(1), "ensemble": staged}, Echo(), x, y)
    assert tally.result().waterfall == [
        Step("clean", 5),
        Step("one", 4),
        Step("ensemble: first", 4),
        Step("ensemble: second", 3),
        Step("ensemble: third", 2),
    ]
    assert tally.records.column("ensemble", "stage").tolist() == [1, -1, -1, 2, -1, -1]
    assert tally.result().num_robust == 2


def test_an_image_that_no_stage_claims_falls_with_the_whole_attack():
    x, y = images([0, 1]), torch.tensor([0, 1])
    tally = tally_of({"ensemble": Staged({0: -1, 1: 0})}, Echo(), x, y)
    assert [step.num_robust for step in tally.result().waterfall] == [2, 1, 1, 0]


def test_a_record_per_image_says_what_happened_to_it():
    x, y = images([0, 1, 2]), torch.tensor([0, 1, 0])
    tally = tally_of({"a": Breaks(0)}, Echo(), x, y)
    rows = [dict(zip(tally.records.columns, row, strict=True)) for row in tally.records.table.tolist()]
    assert [(row["id"], row["label"], row["prediction"], row["a/held"]) for row in rows] == [
        (0, 0, 0, 0),
        (1, 1, 1, 1),
        (2, 0, 2, 0),
    ]
