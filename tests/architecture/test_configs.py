"""Every shipped YAML file parses through the command, and what it names can be made."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import robustdist.configs
from robustdist.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.y*ml"))
WHOLE = [name for name in FILES if "/" not in name or name.startswith("experiment/")]
FRAGMENTS = [name for name in FILES if name not in WHOLE]

# a user's own config, to which fragments are added
BASE = """
model: {class_path: examples.classifiers.SmallConvNet, init_args: {image_size: 8}}
data: {class_path: robustdist.data.DigitsDataModule}
trainer:
  accelerator: cpu
  callbacks: [{class_path: lightning.pytorch.callbacks.LearningRateMonitor}]
"""

Parse = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    """Work where the configs can name ``examples.classifiers``; the command adds the folder to the path."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["robustdist"])


@pytest.fixture
def parse(tmp_path, capsys) -> Parse:
    """Return a function that reads config files through ``robustdist fit --print_config``."""
    (tmp_path / "base.yaml").write_text(BASE)

    def parse(*names: str) -> dict[str, Any]:
        files = [tmp_path / "base.yaml" if name == "base" else CONFIGS / name for name in names]
        options = [option for file in files for option in ("--config", str(file))]
        status = main(["fit", *options, "--print_config"])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return yaml.safe_load(printed.out)

    return parse


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / name).read_text())


def contains(found: Any, written: Any) -> bool:
    """Whether ``found`` holds everything that was written, with defaults filled in."""
    if isinstance(written, dict):
        return isinstance(found, dict) and all(contains(found.get(key), value) for key, value in written.items())
    if isinstance(written, list):
        return len(found) == len(written) and all(map(contains, found, written))
    return found == written


def build(node: Any) -> Any:
    """Make the objects that a parsed config describes, without the command line's own machinery."""
    if isinstance(node, dict) and "class_path" in node:
        module, _, name = node["class_path"].rpartition(".")
        arguments = {key: build(value) for key, value in (node.get("init_args") or {}).items()}
        arguments |= arguments.pop("dict_kwargs", {})
        return getattr(importlib.import_module(module), name)(**arguments)
    if isinstance(node, dict):
        return {key: build(value) for key, value in node.items()}
    return [build(value) for value in node] if isinstance(node, list) else node


def own_callbacks(written: dict[str, Any]) -> list[Any]:
    trainer = written.get("trainer", {})
    return trainer.get("callbacks+", trainer.get("callbacks", []))


def test_there_are_fragments_and_whole_configs():
    assert {name.split("/")[0] for name in WHOLE} == {"experiment", "quickstart.yaml"}
    assert {name.split("/")[0] for name in FRAGMENTS} == {
        "attack",
        "checkpoint",
        "comm",
        "domains",
        "evaluation",
        "guard",
        "learners",
        "optim",
        "prune",
        "trainer",
    }


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_is_added_to_the_users_config(parse, name):
    alone, parsed, written = parse("base"), parse("base", name), read(name)
    own = own_callbacks(written)
    assert "callbacks" not in written.get("trainer", {}), "a fragment appends, it does not replace"
    callbacks = parsed["trainer"]["callbacks"]
    assert contains(callbacks[len(callbacks) - len(own) :], own)
    assert callbacks[: len(callbacks) - len(own)] == alone["trainer"]["callbacks"]
    rest = copy.deepcopy(written)
    rest.get("trainer", {}).pop("callbacks+", None)
    assert contains(parsed, rest)
    untouched = {key for key in alone if key not in written}
    assert {key: parsed[key] for key in untouched} == {key: alone[key] for key in untouched}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_config_stands_alone(parse, name):
    parsed = parse(name)
    assert contains(parsed, read(name))
    assert parsed["model"]["class_path"]
    assert parsed["data"]["class_path"]


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_names_can_be_made_with_its_arguments(parse, name):
    parsed = parse(name) if name in WHOLE else parse("base", name)
    callbacks = [build(node) for node in parsed["trainer"]["callbacks"]]
    assert len(callbacks) >= len(own_callbacks(read(name)))
    for attack in (parsed.get("report") or {}).get("attacks", {}).values():
        assert build(attack).settings()["eps"] == 0.3
    for callback in callbacks:
        if type(callback).__name__ == "AdversarialTraining":
            assert 0 < callback.attack.eps <= 0.3
            assert callback.attack.step_size > 0


def test_fragments_can_be_stacked(parse):
    names = ["attack/dat_pgd.yaml", "evaluation/pgd20.yaml", "optim/lalr.yaml", "trainer/two_processes.yaml"]
    parsed = parse("base", *names)
    kinds = [callback["class_path"].rpartition(".")[2] for callback in parsed["trainer"]["callbacks"]]
    assert kinds == ["LearningRateMonitor", "AdversarialTraining", "RobustEvaluation", "ModelCheckpoint"]
    assert parsed["optimizer"]["class_path"] == "robustdist.optim.LALR"
    assert (parsed["trainer"]["strategy"], parsed["trainer"]["devices"]) == ("ddp", 2)


def test_the_radius_is_the_written_one(parse):
    (callback,) = (
        build(node) for node in parse("base", "attack/dat_fgsm.yaml")["trainer"]["callbacks"] if "Adv" in str(node)
    )
    assert callback.attack.eps == 8 / 255
    assert callback.attack.step_size == 1.25 * 8 / 255
    assert callback.attack.random_start
    assert callback.objective.clean_weight == 0


@pytest.mark.parametrize("name", FILES)
def test_configs_are_found_by_name(name):
    assert robustdist.configs.path(name).read_text() == (CONFIGS / name).read_text()


def test_a_misspelled_fragment_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(BASE)
    wrong = (CONFIGS / "attack/pgd.yaml").read_text().replace("steps:", "stepz:")
    assert "stepz" in wrong
    (tmp_path / "wrong.yaml").write_text(wrong)
    options = [f"--config={tmp_path / name}.yaml" for name in ("base", "wrong")]
    assert main(["fit", *options, "--print_config"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "stepz" in error
