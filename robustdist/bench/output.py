"""Where a benchmark's figures go: checked before the run, written as a whole after it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from robustdist.core.files import write_whole
from robustdist.errors import UsageError

__all__ = ["check_out", "finished_runs", "make_console", "write_json"]

_WIDTH_WITHOUT_TERMINAL = 120


def check_out(out: str | None) -> Path | None:
    """Return ``out`` as a path into which ``write_json`` can write; None stays None.

    Raises:
        UsageError: If it is a folder, or its folder is missing or read-only.
    """
    if out is None:
        return None
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"out={out!r} is a folder: give a file name, for example {str(path / 'bench.json')!r}")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"out={out!r}: the folder {str(folder)!r} does not exist, create it or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"out={out!r}: the folder {str(folder)!r} cannot be written to, choose another one")
    return path


def finished_runs(path: Path | None, benchmark: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that an earlier call with the same settings left in a file, which may not be there yet.

    Args:
        path: The file, or None.
        benchmark: Name of the benchmark in the file.
        settings: All that its figures depend on.

    Raises:
        UsageError: If the file holds something else.
    """
    if path is None or not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        same = content["benchmark"] == benchmark and content["settings"] == settings
        runs: list[dict[str, Any]] = content["runs"]
    except (ValueError, KeyError, TypeError):
        same, runs = False, []
    if not same:
        raise UsageError(f"out={str(path)!r} holds something else than figures of these settings: choose another file")
    return runs


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as JSON, whole or not at all."""
    write_whole(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def make_console() -> Console:
    """Return a console on the standard output, wide enough for a table when that is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)
