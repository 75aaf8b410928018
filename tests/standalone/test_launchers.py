"""The launchers that start processes anew, against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import train_script

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
