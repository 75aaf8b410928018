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

__all__ = ["check_out", "make_console", "write_json"]

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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as JSON, whole or not at all."""
    write_whole(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def make_console() -> Console:
    """Return a console on the standard output, wide enough for a table when that is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)
