"""One process works with one of the two Lightning packages: the one the user's code imported first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from robustdist import _lightning
from robustdist._lightning import check_same_package

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# A fresh interpreter that imports what needs no Lightning, then forks once per case: torch is imported only once.
_SCRIPT = """
import importlib, json, os, sys

CASES = {
    "nothing": ([], "pytorch_lightning"),
    "lightning": (["lightning"], None),
    "other": (["pytorch_lightning.callbacks"], "lightning.pytorch"),
    "both": (["pytorch_lightning", "lightning.pytorch"], None),
}

def loaded():
    return sorted({"lightning", "pytorch_lightning"} & set(sys.modules))

def case(first, other):
    for name in first:
        importlib.import_module(name)
    from robustdist import _lightning as shim
    from robustdist.callbacks import AdversarialTraining, RobustEvaluation
    from robustdist.cli.trainer import RobustTrainer
    from robustdist.data import DigitsDataModule, ImageDataModule
    from robustdist.errors import UsageError
    bases = [kind.__mro__[1] for kind in (AdversarialTraining, RobustEvaluation, RobustTrainer, ImageDataModule)]
    bases += [value for value in (getattr(shim, name) for name in shim.__all__) if isinstance(value, type)]
    found = {"package": shim.PACKAGE, "roots": sorted({base.__module__.split(".")[0] for base in bases})}
    found["loaded"] = loaded()
    if other is not None:
        theirs = type("Mine", (importlib.import_module(other).LightningModule,), {})
        shim.check_same_package(type("Fine", (shim.LightningModule,), {})())
        try:
            shim.check_same_package(theirs())
        except UsageError as error:
            found["refusal"] = str(error)
    return found

import robustdist
report = {"robustdist": loaded()}
for name in ("attacks", "objectives", "optim", "report", "evaluation", "bench", "core.muted"):
    importlib.import_module(f"robustdist.{name}")
    report[name] = loaded()
for name, arguments in CASES.items():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(case(*arguments), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.wait()
    report[f"case {name}"] = json.loads(text) if text else None
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=110
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "name", ["robustdist", "attacks", "objectives", "optim", "report", "evaluation", "bench", "core.muted"]
)
def test_what_needs_no_trainer_does_not_load_one(report, name):
    assert report[name] == []


@pytest.mark.parametrize(
    ("case", "package", "loaded"),
    [
        ("nothing", "lightning.pytorch", ["lightning"]),
        ("lightning", "lightning.pytorch", ["lightning"]),
        ("other", "pytorch_lightning", ["pytorch_lightning"]),
        ("both", "lightning.pytorch", ["lightning", "pytorch_lightning"]),
    ],
)
def test_robustdist_follows_what_was_imported_first(report, case, package, loaded):
    found = report[f"case {case}"]
    assert found["package"] == package
    assert found["roots"] == [package.split(".")[0]]
    assert found["loaded"] == loaded, "the other package is not loaded for nothing"


@pytest.mark.parametrize(
    ("case", "own", "other"),
    [
        ("nothing", "lightning.pytorch", "pytorch_lightning"),
        ("other", "pytorch_lightning", "lightning.pytorch"),
    ],
)
def test_a_module_of_the_other_package_is_refused(report, case, own, other):
    message = report[f"case {case}"]["refusal"]
    assert message.startswith(f"Mine derives from {other} but robustdist works with {own} in this process")
    assert f"`import {own} as pl`" in message
    assert f"import {other} before robustdist" in message


def test_every_name_of_the_shim_is_there():
    assert [name for name in _lightning.__all__ if not hasattr(_lightning, name)] == []
    assert _lightning.Trainer.__module__.startswith(_lightning.PACKAGE)


def test_what_has_nothing_to_do_with_lightning_passes():
    class Plain:
        pass

    assert check_same_package(Plain()) is None
