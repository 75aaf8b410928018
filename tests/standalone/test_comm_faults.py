"""A rank that dies or stops, in processes started as on several machines: the other ends soon and names it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.standalone, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kill", "rank 1 does not answer, dead or stopped"),
        ("stop", "rank 1 does not answer, dead or stopped"),
        ("raise", "rank 1: ArithmeticError: this batch is too much"),
    ],
)
def test_the_others_end_and_name_the_rank(what, message):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.standalone.comm_faults", what], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "WORLD_SIZE": "2", "NODE_RANK": str(rank), "LOCAL_RANK": "0", "RANK": str(rank),
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        began = _end_of(processes[1], what)
        output, _ = processes[0].communicate(timeout=60)
        assert processes[0].returncode == 1
        assert time.monotonic() - began < 30
        assert message in output, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _end_of(process: subprocess.Popen[str], what: str) -> float:
    """Wait until the process is dead or stopped, and return when that was."""
    while True:
        if what == "kill" and process.poll() == -signal.SIGKILL:
            return time.monotonic()
        if what == "raise" and process.poll() == 1:
            return time.monotonic()
        if what == "stop" and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return time.monotonic()
        assert process.poll() in (None, 1), process.communicate()
        time.sleep(0.05)
