"""The launchers that start processes anew, against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import prune_script, train_script

pytestmark = [pytest.mark.standalone, pytest.mark.timeout(180)]

SCRIPT = Path(train_script.__file__)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "result"
    train_script.main("auto", str(path))
    return torch.load(f"{path}.0")


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused", "ddp_spawn", "compressed", "compressed_spawn"])
def test_two_started_processes_train_as_one(tmp_path, single, strategy):
    path = tmp_path / "result"
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), strategy, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=170
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    ranks = [torch.load(f"{path}.{rank}") for rank in range(2)]

    begin = {name: value.double() for name, value in train_script.Classifier().state_dict().items()}
    assert max(float((single["weights"][name] - value).abs().max()) for name, value in begin.items()) > 1e-2
    for result in ranks:
        assert result["world_size"] == 2
        for name, value in single["weights"].items():
            assert float((result["weights"][name] - value).abs().max()) < 1e-10
            assert torch.equal(result["weights"][name], ranks[0]["weights"][name])
        assert result["counters"] == single["counters"]
        assert result["counters"]["num_steps"] == train_script.NUM_STEPS
        assert result["history"] == single["history"]
        assert result["num_samples"] == 33


@pytest.mark.parametrize("strategy", ["ddp", "robust_ddp_spawn"])
def test_two_started_processes_end_with_the_same_small_network(tmp_path, strategy):
    path = tmp_path / "result"
    finished = subprocess.run(
        [sys.executable, prune_script.__file__, strategy, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=170,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    ranks = [torch.load(f"{path}.{rank}", weights_only=True) for rank in range(2)]
    assert ranks[0]["recipe"] == ranks[1]["recipe"]
    assert ranks[0]["weights"]["net.conv.weight"].shape[0] == 2
    for name, value in torch.load(f"{path}.main", weights_only=True).items():
        assert torch.equal(value, ranks[0]["weights"][name])
        if "running" not in name:
            assert torch.equal(value, ranks[1]["weights"][name])
