"""One process per rank for a benchmark, each on its own end of the links; ``python -m`` of this file is one of them."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from robustdist.bench.links import Links
from robustdist.bench.output import write_json

__all__ = ["RanksError", "run_task"]

#: What a rank can be asked to do: module and function.
TASKS = {
    "reduce": ("robustdist.bench.comm_reduce", "measure"),
    "train": ("robustdist.bench.comm_train", "run_rank"),
}


class RanksError(RuntimeError):
    """A rank failed or did not end in time; the text says which and how."""


def run_task(
    task: str, arguments: dict[str, Any], *, links: Links, world_size: int, timeout: float
) -> list[dict[str, Any]]:
    """Run a task of :data:`TASKS` on all ranks and return what each of them returned.

    Args:
        task: Its name.
        arguments: For the function; plain values.
        links: Where the ranks run.
        world_size: Number of ranks.
        timeout: Seconds after which all are ended.

    Raises:
        RanksError: If one failed, with the last line of its error, or if they took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "task.json", {"task": task, "arguments": arguments})
        environment = {
            **os.environ,
            **links.environment(),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "OMP_NUM_THREADS": "1",
            # this package, wherever it was imported from
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        processes = []
        try:
            for rank in range(world_size):
                with (folder / f"{rank}.log").open("w") as log:
                    command = [*links.command(rank), sys.executable, "-m", "robustdist.bench.ranks", name]
                    own = {**environment, "RANK": str(rank), "NODE_RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env=own, stderr=log, stdin=subprocess.PIPE))
            _wait(processes, folder, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout: float) -> None:
    """Wait until all have ended well, or one has not."""
    while True:
        states = [process.poll() for process in processes]
        for rank, state in enumerate(states):
            if state:
                raise RanksError(f"rank {rank} ended with status {state}: {_last_words(folder / f'{rank}.log')}")
        if all(state == 0 for state in states):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, state in enumerate(states) if state is None]
            raise RanksError(f"ranks {running} did not end within {timeout:.0f} s")
        time.sleep(0.02)


def _last_words(log: Path) -> str:
    text = re.sub(r"^\[rank\d+\]: ?", "", log.read_text(errors="replace"), flags=re.MULTILINE)  # torch marks its lines
    lines = [line for line in text.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"[\w.]*Error\b", line)]
    return (told or lines or ["no message"])[-1]


def _follow() -> None:
    """End with the benchmark, however that ends: its side of this pipe is then closed."""
    os.read(0, 1)  # sys.stdin has a lock, which the end of the interpreter would find taken
    os._exit(1)


def _main(folder: Path) -> None:
    threading.Thread(target=_follow, daemon=True).start()
    content = json.loads((folder / "task.json").read_text())
    module, function = TASKS[content["task"]]
    result = getattr(importlib.import_module(module), function)(**content["arguments"])
    write_json(folder / f"{os.environ['RANK']}.json", result)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
