"""Wrong input on the command line: exit status 2 and one line that names the option and the remedy."""

import subprocess
import sys

import pytest
import yaml
from torch import nn

from robustdist import configs
from robustdist.cli import main
from robustdist.cli.messages import usage_message
from robustdist.errors import UsageError

QUICKSTART = configs.path("quickstart.yaml")


@pytest.fixture
def config(tmp_path):
    """Write the quick start with changes; ``path`` leads to the mapping that is updated."""

    def write(path, **changes):
        content = yaml.safe_load(QUICKSTART.read_text())
        target = content
        for key in path:
            target = target[key]
        target.update(changes)
        place = tmp_path / "config.yaml"
        place.write_text(yaml.safe_dump(content))
        return place

    return write


ATTACK = ("trainer", "callbacks", 0, "init_args", "attack", "init_args")
TRAINING = ("trainer", "callbacks", 0, "init_args")
JUDGE = ("report", "attacks", "apgdt", "init_args")

WRONG = {
    "eps in 255 units": (ATTACK, {"eps": 8}, ["eps=8", "8/255", "bounds"]),
    "eps no number": (ATTACK, {"eps": "8//255"}, ["eps='8//255'", "8/255"]),
    "zero steps": (ATTACK, {"steps": 0}, ["steps=0", "at least 1"]),
    "negative steps": (ATTACK, {"steps": -3}, ["steps=-3", "at least 1"]),
    "unknown norm": (ATTACK, {"norm": "linff"}, ["norm", "'linf'", "'l2'", "linff"]),
    "misspelt key": (ATTACK, {"stepz": 7}, ["'stepz'", "'steps'"]),
    "misspelt key of the callback": (TRAINING, {"atack": None}, ["'atack'", "'attack'"]),
    "misspelt class": (TRAINING, {"objective": "robustdist.objectives.PDGAT"}, ["PDGAT", "'PGDAT'"]),
    "negative clean weight": (
        TRAINING,
        {"objective": {"class_path": "robustdist.objectives.DAT", "init_args": {"clean_weight": -1.0}}},
        ["clean_weight=-1.0", "not negative"],
    ),
    "unknown torchattacks class": (JUDGE, {"name": "APGDX"}, ["APGDX", "did you mean"]),
    "unknown torchattacks argument": (JUDGE, {"settings": {"stepz": 3}}, ["stepz", "steps"]),
    "unknown trainer option": (("trainer",), {"strategi": "ddp"}, ["trainer.strategi", "trainer.strategy"]),
    "strategy as a list": (("trainer",), {"strategy": ["ddp"]}, ["trainer.strategy", "str", "['ddp']"]),
    "strategy that cannot be made": (
        ("trainer",),
        {"strategy": {"class_path": "robustdist.strategies.QuantizedDataStrategy", "init_args": {"bits": 9}}},
        ["bits=9 must be a whole number from 1 to 8"],
    ),
    "no number of epochs": (("trainer",), {"max_epochs": "many"}, ["trainer.max_epochs", "int", "many"]),
    "unknown report option": (("report",), {"dirr": "x"}, ["'dirr'", "'dir'"]),
    "control of nothing": (
        ("trainer",),
        {"callbacks": [{"class_path": "robustdist.callbacks.RobustEvaluation"}]},
        ["report.control", "AdversarialTraining", "configs/attack/pgd.yaml"],
    ),
    "report into a file": (("report",), {"dir": str(QUICKSTART)}, ["report.dir", "is a file"]),
    "number for a schedule": (TRAINING, {"eps_schedule": 0.3}, ["eps_schedule", "0.3"]),
    "same fragment twice": (
        ("trainer",),
        {"callbacks": [{"class_path": "robustdist.callbacks.RobustEvaluation"}] * 2},
        ["RobustEvaluation"],
    ),
}


@pytest.mark.parametrize(("path", "changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_configuration(command, config, path, changes, words):
    status, _, lines = command("fit", "--config", config(path, **changes))
    assert status == 2
    assert len(lines) == 1
    assert [word for word in words if word not in lines[0]] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
        (["fit", "--config", QUICKSTART, "--trainer.max_epochz", "3"], ["trainer.max_epochz", "trainer.max_epochs"]),
        (["fit", "--trainer.max_epochs", "3"], ["model", "--config"]),
        (["fitt"], ["fitt", "evaluate"]),
        (["evaluate", "--config", QUICKSTART, "--ckpt_path", "none.ckpt"], ["ckpt_path", "none.ckpt", "checkpoint"]),
        (["fit", "--config", QUICKSTART, "--ckpt_path", "none.ckpt"], ["ckpt_path", "none.ckpt"]),
        (
            ["fit", "--config", QUICKSTART, "--model", "pytorch_lightning.demos.boring_classes.BoringModel"],
            ["BoringModel", "pytorch_lightning", "import lightning.pytorch as pl"],
        ),
        (["fit", "--config", QUICKSTART, "--model", "nowhere.Net"], ["nowhere"]),
        (["bench", "attack", "--rounds", "0"], ["rounds=0", "at least 1"]),
        (["bench", "attacks"], ["attacks", "attack"]),
        (["bench", "attack", "--out", "no/such/folder/f.json"], ["out"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else None,
)
def test_wrong_arguments(command, arguments, words):
    status, _, lines = command(*arguments)
    assert status == 2
    assert len(lines) == 1
    assert [word for word in words if word not in lines[0]] == []


def test_a_failure_while_running_is_not_blamed_on_the_user(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr("robustdist.cli.lightning_cli.run_lightning_cli", fail)
    assert main(["fit"]) == 1
    assert "disk on fire" in capsys.readouterr().err


def test_a_usage_error_is_found_behind_another_error():
    error = RuntimeError("worker died")
    error.__cause__ = UsageError("eps: mend it")
    assert usage_message(error) == "eps: mend it"


def test_a_workers_usage_error_arrives_as_text():
    text = "Traceback:\n  ...\nrobustdist.errors.UsageError: steps=0 must be at least 1\n"
    assert usage_message(RuntimeError(text)) == "steps=0 must be at least 1"
    assert usage_message(RuntimeError("something else")) is None


def test_weights_of_another_shape_are_the_checkpoints_and_name_pruning():
    net = nn.Linear(3, 2)
    with pytest.raises(RuntimeError) as failed:
        net.load_state_dict(nn.Linear(3, 4).state_dict())
    message = usage_message(failed.value)
    assert message is not None
    assert "weight is torch.Size([4, 3]) in the file and torch.Size([2, 3]) in the model" in message
    assert "StructuredPruning among the callbacks" in message


def test_help_version_and_no_arguments(command):
    for arguments in ([], ["--help"], ["fit", "--help"], ["bench", "--help"], ["--version"]):
        status, out, lines = command(*arguments)
        assert status == 0
        assert lines == []
        assert out


def test_help_names_every_verb(command):
    _, out, _ = command("--help")
    assert [verb for verb in ("fit", "validate", "test", "evaluate", "bench attack") if verb not in out] == []


def test_missing_torchattacks_names_the_extra(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    status, _, lines = command("fit", "--config", QUICKSTART)
    assert status == 2
    assert "robustdist[attacks]" in lines[0]


@pytest.mark.slow
def test_module_form_is_the_same_command():
    found = subprocess.run(
        [sys.executable, "-m", "robustdist", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("robustdist 0.")
