"""Turn exceptions that the user can mend into one sentence."""

from __future__ import annotations

import argparse
import difflib
import re

from robustdist.errors import UsageError

__all__ = ["usage_message"]

_LIGHTNING_CONFIGURATION_ERROR = "MisconfigurationException"


def usage_message(error: BaseException) -> str | None:
    """Return one line that says what to change, or None if ``error`` is not the user's to mend."""
    for cause in _chain(error):
        if isinstance(cause, UsageError):
            return _one_line(str(cause))
    if isinstance(error, argparse.ArgumentError):
        return _parser_message(str(error))
    if type(error).__name__ == _LIGHTNING_CONFIGURATION_ERROR:
        return _one_line(str(error))
    # fork and spawn launchers hand over a worker's exception as text
    workers = re.findall(r"robustdist\.errors\.UsageError: (.+)", str(error))
    return _one_line(workers[-1]) if workers else None


def _chain(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _parser_message(text: str) -> str:
    unknown = re.search(r"[Kk]ey [\"']?([\w.]+)[\"']? is not expected|Unrecognized arguments: (\S+)", text)
    if unknown:
        return f"unknown option {next(filter(None, unknown.groups()))!r}: check its spelling with --help"
    lines = [line.strip(" -") for line in text.splitlines() if line.strip(" -")]
    # a union lists why each of its types failed; what helps is the line about the class the user named
    return _one_line(": ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else "invalid arguments")


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def closest(word: str, known: list[str]) -> str | None:
    """Return the known word most like ``word``, or None."""
    found = difflib.get_close_matches(word, known, n=1)
    return found[0] if found else None
