"""Turn exceptions that the user can mend into one sentence."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

from robustdist._lightning import Trainer, check_same_package
from robustdist.errors import UsageError

__all__ = ["usage_message"]

# Lines of a jsonargparse message that repeat structure instead of saying what is wrong.
_STRUCTURE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Not a valid subclass|Subclass types expect|a class path \(str\)"
    r"|a dict with|Expected a <class 'NoneType'>|Expected a path but|$"
)
_LONGEST_VALUE = 60


def usage_message(error: BaseException) -> str | None:
    """Return one line that says what to change, or None if ``error`` is not the user's to mend."""
    for cause in _causes(error):
        if isinstance(cause, UsageError):
            return _one_line(str(cause))
    if isinstance(error, argparse.ArgumentError):
        return _one_line(_parser_message(str(error)))
    if type(error).__name__ == "MisconfigurationException":
        return _one_line(str(error))
    if isinstance(error, ValueError) and str(error).startswith("Does not validate against any of the Union"):
        # an argument of several types, one of which refused to be made: only the texts are left of why
        reasons = re.findall(r"^\s*- (?!Expected an? )(.+)", str(error), re.MULTILINE)
        return _one_line(reasons[-1]) if reasons else None
    twice = re.match(r"Found more than one stateful callback of type `(\w+)`", str(error))
    if twice:
        return f"trainer.callbacks holds {twice.group(1)} twice: give its fragment once (a `callbacks+:` file appends)"
    mismatch = re.search(r"size mismatch for (\S+): .*?(torch\.Size\(\[.*?\]\)).*?(torch\.Size\(\[.*?\]\))", str(error))
    if mismatch:
        name, saved, built = mismatch.groups()
        return (
            f"ckpt_path does not fit: {name} is {saved} in the file and {built} in the model; give the options that "
            "the model was built with, or, if it was pruned, StructuredPruning among the callbacks, which takes the "
            "structure from the file"
        )
    # fork and spawn launchers hand over a worker's exception as text
    workers = re.findall(r"robustdist\.errors\.UsageError: (.+)", str(error))
    return _one_line(workers[-1]) if workers else None


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _parser_message(text: str) -> str:
    option = re.search(r"unrecognized arguments: --?(\S+)|does not accept option '([^']+)'", text)
    if option:
        name = next(filter(None, option.groups())).split("=")[0]
        known = [f"trainer.{parameter}" for parameter in _parameters(Trainer)]
        return f"unknown option {name!r}{_suggestion(name, known, 'check its spelling with --help')}"
    required = re.search(r"arguments are required: (.+)", text)
    if required:
        names = re.sub(r"\b(fit|validate|test|predict|evaluate|remeasure|plan|export)\.", "", required.group(1))
        return f"missing: {names}; give them with --config FILE or as options"
    return _deepest_problem(text)


def _deepest_problem(text: str) -> str:
    """Find the innermost complaint in jsonargparse's indented tree and the path of keys and classes to it."""
    path: list[tuple[int, str]] = []
    found: list[tuple[list[str], str]] = []
    for line in text.splitlines():
        stripped = line.strip().removeprefix("- ")
        if not stripped:
            continue
        indent = len(line) - len(line.lstrip())
        path = [entry for entry in path if entry[0] < indent]
        key = re.match(r'Parser key "([^"]+)":\s*(.*)', stripped)
        class_path = re.match(r"Problem with given class_path '([^']+)':", stripped)
        if key:
            path.append((indent, key.group(1)))
            stripped = key.group(2)
        elif class_path:
            path.append((indent, class_path.group(1)))
            continue
        if not _STRUCTURE.match(stripped):
            found.append(([label for _, label in path], stripped))
    if not found:
        return text
    # the first of the deepest: a union goes on to list why its other types do not fit either
    labels, problem = max(found, key=lambda entry: len(entry[0]))
    value = re.findall(r"Given value: (.+)", text)
    worded = _worded(problem, labels, value[0] if value else "")
    place = ".".join([*labels[:1], *(label.rsplit(".", 1)[-1] for label in labels[1:])])
    return f"{place}: {worded}" if place else worded


def _worded(problem: str, labels: list[str], value: str) -> str:
    option = re.search(r"Option '([^']+)' is not accepted", problem)
    if option:
        known = _parameters(_import(labels[-1]))
        return f"unknown option {option.group(1)!r}{_suggestion(option.group(1), known, 'see its documentation')}"
    attribute = re.search(r"module '([^']+)' has no attribute '([^']+)'", problem)
    if attribute:
        module, name = attribute.groups()
        return f"{problem}{_suggestion(name, dir(_import(module)), 'check the class path')}"
    if "Import path does not correspond to a subclass" in problem:
        foreign = _import(value)
        if isinstance(foreign, type):
            try:
                check_same_package(foreign)
            except UsageError as error:
                return str(error)
        return f"{problem}: {value}"
    problem = re.sub(r"Expected an? <class '(\w+)'>", r"expected \1", problem).replace(
        "Expected a typing.Literal", "expected one of "
    )
    return f"{problem}, got {value}" if 0 < len(value) <= _LONGEST_VALUE and value not in problem else problem


def _parameters(owner: Any) -> list[str]:
    """Return the names of the constructor's arguments, through ``**kwargs`` up to the base classes."""
    classes = inspect.getmro(owner) if isinstance(owner, type) else ()
    constructors = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
    names = [name for constructor in constructors for name in inspect.signature(constructor).parameters]
    return [name for name in dict.fromkeys(names) if name not in ("self", "args", "kwargs")]


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name) if module else importlib.import_module(name)
    except (ImportError, AttributeError):
        return None


def _suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": {otherwise}"
