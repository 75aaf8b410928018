"""The benchmark of a training on slow links: what is refused, and figures of a short one without a limit."""

from __future__ import annotations

import importlib
import json
import os

import pytest

from robustdist.bench import bench_comm_train, comm_train
from robustdist.bench.ranks import TASKS
from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": ["fp8"]}, "rows=['fp8'] are unknown: choose some of ddp"),
        ({"data": "cifar"}, "data='cifar' is unknown"),
        ({"link": "10gbit"}, "link='10gbit' must be one of 100mbit"),
        ({"steps": 3}, "steps=3 must be more than the 3"),
        ({"world_size": 1}, "world_size=1 must be from 2"),
        ({"width": 0}, "width=0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(options, words, monkeypatch):
    monkeypatch.setattr(comm_train, "run_task", lambda *args, **kwargs: pytest.fail("measured"))
    with pytest.raises(UsageError) as caught:
        bench_comm_train(**options)
    assert words in str(caught.value)


def forked(task, arguments, *, links, world_size, timeout):
    """Run ranks with what this process has imported: Lightning takes each of them seconds to load."""
    module, function = TASKS[task]
    train = getattr(importlib.import_module(module), function)

    def run_rank(rank: int) -> str:
        os.environ |= {"WORLD_SIZE": str(world_size), "NODE_RANK": str(rank), "RANK": str(rank), "LOCAL_RANK": "0"}
        return json.dumps(train(**arguments))

    return [json.loads(answer) for answer in run_ranks(run_rank, world_size, timeout=timeout)]


@pytest.mark.slow
def test_figures(tmp_path, require, monkeypatch):
    require("mlxtend")
    monkeypatch.setattr(comm_train, "run_task", forked)
    out = tmp_path / "figures.json"
    result = bench_comm_train(["ddp", "schedule"], "none", steps=8, width=64, data="mnist5k", out=str(out))
    assert json.loads(out.read_text()) == result
    plain, quantised = result["rows"]
    assert plain["ratio"] == 1
    assert plain["faster_than_ddp"] == 1
    assert 5 < quantised["ratio"] < 8  # between 2 bits and 8
    assert quantised["mean_bits"] == 5
    for run in result["runs"]:
        for rank in run["ranks"]:
            assert len(rank["seconds"]) == 8 - 3
            assert rank["nic_bytes"] is None
    assert plain["accuracy"] > 0.3
