"""What is shipped: packages, links, built archives, public names, examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import robustdist

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Everything a user may import. A change here is one for the changelog.
PUBLIC = {
    "robustdist": ["RobustDistWarning", "UsageError", "__version__"],
    "robustdist.attacks": [
        "APGD", "FAB", "FGSM", "MIFGSM", "PGD", "Attack", "AttackResult", "AutoAttack", "Embeddings",
        "FriendlyPGD", "LinearRamp", "NoiseFGSM", "Piecewise", "Pixels", "Problem", "Schedule", "Square", "TokenPGD",
        "TorchAttack",
    ],
    "robustdist.callbacks": [
        "AdversarialTraining", "CatastrophicOverfittingGuard", "CommunicationMonitor", "DomainReweighting",
        "LearnerTuning", "RobustEvaluation", "StructuredPruning",
    ],
    "robustdist.comm": [
        "BF16", "DGC", "EF21", "FP8", "FP16", "QSGD", "BitController", "BitSchedule", "Compressor", "ErrorFeedback",
        "FixedBits", "Identity", "Int8", "MQGrad", "Memory", "MomentumReducer", "Natural", "Payload",
        "PowerSGD", "RandomK", "SampleQuantizer", "Sign", "TernGrad", "TopK", "make_compressor", "make_controller",
    ],
    "robustdist.data": [
        "DigitsDataModule", "FashionMNISTDataModule", "ImageDataModule", "MNIST5kDataModule", "Parts",
        "PhotoPatchesDataModule", "UnlabeledMix", "VADERDataModule", "stratified_split",
    ],
    "robustdist.domains": [
        "DomainMixer", "DomainSampler", "excess_losses", "find_domain_ids", "fit_scaling_laws", "floored",
        "multiplicative_ratios", "next_potential", "predicted_loss", "with_sampler", "worst_mix",
    ],
    "robustdist.learners": ["Learners", "LowRankPair"],
    "robustdist.objectives": [
        "AWP", "DAT", "FGSMRS", "MART", "NFGSM", "PGDAT", "TRADES", "ConAdv", "FastBAT", "FreeAT", "FreeLB",
        "FriendlyAT", "GradAlign", "Objective", "ObjectiveContext",
    ],
    "robustdist.optim": ["LALR", "OneBitAdam"],
    "robustdist.strategies": ["CompressedDDPStrategy", "QuantizedDataStrategy", "RobustDDPStrategy"],
    "robustdist.evaluation": ["Records", "RobustTally", "SavedExamples", "load_examples", "remeasure"],
    "robustdist.diagnostics": [
        "Diagnosis", "Part", "Subset", "diagnose", "examine", "not_run", "with_diagnosis",
    ],
    "robustdist.configs": ["path"],
    "robustdist.cli": ["main"],
}  # fmt: skip


def git(*args: str) -> list[str]:
    result = subprocess.run(["git", *args, "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in result.stdout.split("\0") if line]


def tree(suffixes: tuple[str, ...] = (".py",)) -> set[str]:
    """Files of the package with one of the suffixes, links followed, relative to the root."""
    found = set()
    for place, _, names in os.walk(ROOT / "robustdist", followlinks=True):
        paths = (Path(place, name).relative_to(ROOT) for name in names if name.endswith(suffixes))
        found |= {path.as_posix() for path in paths}
    return found


def modules() -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(robustdist.__path__, "robustdist.")]
    return ["robustdist", *(name for name in names if not name.endswith("__main__"))]


# --- names


def test_the_package_list_is_the_tree():
    folders = {Path(file).parent.as_posix().replace("/", ".") for file in tree() if file.endswith("__init__.py")}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders)
    orphans = {file for file in tree() if Path(file).parent.as_posix().replace("/", ".") not in folders}
    assert orphans == set(), "a folder without __init__.py is not shipped"


@pytest.mark.parametrize("name", ["callbacks", "configs"])
def test_the_inner_folders_are_links_in_git_and_on_disk(name):
    (entry,) = git("ls-files", "-s", f"robustdist/{name}")
    assert entry.split()[0] == "120000"
    assert (ROOT / "robustdist" / name).is_symlink()
    assert os.readlink(ROOT / "robustdist" / name) == f"../{name}"
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"robustdist.{name}"] == name
    assert (ROOT / name / "__init__.py").is_file()


def test_no_other_link_is_tracked():
    assert [entry.split()[-1] for entry in git("ls-files", "-s") if entry.startswith("120000")] == [
        "robustdist/callbacks",
        "robustdist/configs",
    ]


def test_versions_agree():
    assert PROJECT["project"]["version"] == robustdist.__version__


def test_the_command_is_there():
    module, _, function = PROJECT["project"]["scripts"]["robustdist"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_both_outer_folders_are_left_to_the_linter_once():
    excluded = PROJECT["tool"]["ruff"]["extend-exclude"]
    assert sorted(excluded) == ["robustdist/callbacks", "robustdist/configs"]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_those_of_the_snapshot(module):
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(PUBLIC[module])
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", modules())
def test_every_file_says_what_is_public_and_has_it(module):
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    names = getattr(loaded, "__all__", [])
    assert [name for name in names if not hasattr(loaded, name)] == []
    assert len(set(names)) == len(names)


def test_public_classes_call_themselves_what_users_import():
    # pickles, configs and messages name the place of definition: it must be inside robustdist
    for module, names in PUBLIC.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if isinstance(value, type):
                assert value.__module__.split(".")[0] == "robustdist", name
                assert getattr(importlib.import_module(value.__module__), value.__qualname__) is value


# --- examples in docstrings


def test_examples_in_docstrings_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    failed: dict[str, Any] = {}
    attempted = {}
    for name in modules():
        torch.manual_seed(0)
        output: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        loaded = importlib.import_module(name)
        for test in doctest.DocTestFinder().find(loaded, name):
            runner.run(test, out=output.append)
        attempted[name] = runner.tries
        if runner.failures:
            failed[name] = "".join(output)
    assert failed == {}
    assert list(tmp_path.iterdir()) == []
    with_examples = {name for name, count in attempted.items() if count}
    assert with_examples >= {"robustdist.types", "robustdist.optim.lalr", "robustdist.attacks.pgd"}
    assert sum(attempted.values()) >= 30


# --- archives


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """A source archive of the files in git, and the wheel built from that archive."""
    folder = tmp_path_factory.mktemp("build")
    for file in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / file).is_symlink() or (ROOT / file).exists():
            (folder / "source" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / "source" / file, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


SHIPPED = tree((".py", ".yaml", "py.typed"))


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        text = wheel.read(metadata).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == SHIPPED
    assert inside >= {"robustdist/callbacks/adversarial_training.py", "robustdist/configs/attack/pgd.yaml"}
    assert {name.split("/")[0] for name in inside} == {"robustdist"}, "no top-level callbacks or configs"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"\nVersion: {robustdist.__version__}\n" in text
    assert "\nRequires-Dist: torch>=2.5\n" in text


@pytest.mark.slow
def test_the_source_archive_can_be_built_from(archives):
    with tarfile.open(archives[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    outer = {name.removeprefix("robustdist/") for name in SHIPPED if name.split("/")[1] in ("callbacks", "configs")}
    inner = {name for name in SHIPPED if name.split("/")[1] not in ("callbacks", "configs")}
    assert names >= outer | inner | {"pyproject.toml", "LICENSE"}
    assert {name for name in names if name.startswith(("tests/", ".ci/", "lightning_logs/"))} == set()


@pytest.mark.slow
def test_an_installed_wheel_finds_its_callbacks_and_configs(archives, tmp_path):
    with zipfile.ZipFile(archives[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import sys, importlib.util; sys.path.insert(0, sys.argv[1])\n"
        "import robustdist.configs\n"
        "assert robustdist.__file__.startswith(sys.argv[1]), robustdist.__file__\n"
        "print(robustdist.configs.path('attack/pgd.yaml').read_text())\n"
        "print(importlib.util.find_spec('robustdist.callbacks').origin)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert "robustdist.callbacks.AdversarialTraining" in found.stdout
    assert str(tmp_path / "site" / "robustdist" / "callbacks") in found.stdout
