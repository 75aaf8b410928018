"""What every test gets: the process is handed on as it was found, and nothing is left in the repository."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
_CACHES = {".pytest_cache", ".ruff_cache", ".mypy_cache", ".coverage", "__pycache__"}


@pytest.fixture(autouse=True)
def restored_environment():
    """Put ``os.environ`` back: Trainers set the rendezvous address, ranks and seeds there."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def restored_torch():
    """Start with one thread and a fixed seed; put the switches back that a test or a Trainer may turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    dtype = torch.get_default_dtype()
    deterministic = _deterministic()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    matmul_precision = torch.get_float32_matmul_precision()
    grad_enabled = torch.is_grad_enabled()
    anomaly = torch.is_anomaly_enabled()
    yield
    torch.set_default_dtype(dtype)
    if deterministic != _deterministic():
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.set_float32_matmul_precision(matmul_precision)
    torch.set_grad_enabled(grad_enabled)
    torch.set_anomaly_enabled(anomaly)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group():
    """Destroy a process group that a test left, so that the next one can make its own."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def clean_repository():
    """Fail at the end of the session if a test wrote into the repository instead of ``tmp_path``."""
    before = {entry.name for entry in ROOT.iterdir()}
    yield
    left = sorted({entry.name for entry in ROOT.iterdir()} - before - _CACHES)
    assert not left, f"tests left {left} in {ROOT}: write to tmp_path"


@pytest.fixture(scope="session")
def require():
    """Return a function that skips without an optional package, and fails in CI, where all of them must be there."""

    def check(package: str) -> None:
        if importlib.util.find_spec(package) is not None:
            return
        reason = f"the optional package {package} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, but CI must install it")
        pytest.skip(reason)

    return check
