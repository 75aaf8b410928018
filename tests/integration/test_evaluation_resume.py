"""An evaluation that is killed goes on when it is started again, and gives the same report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from robustdist.attacks import PGD
from robustdist.attacks.base import Attack
from robustdist.callbacks import RobustEvaluation
from robustdist.errors import UsageError

from .support import Classifier, loader, make_trainer, trained_net

ROOT = Path(__file__).parents[2]


class Counting(PGD):
    """Notes which images it is asked to attack, and gives up after some."""

    def __init__(self, patience: int = 10**6, **options):
        super().__init__(eps=0.1, steps=2, **options)
        self._asked: list[int] = []
        self._patience = patience

    def settings(self):
        return {name: value for name, value in super().settings().items() if not name.startswith("_")}

    def run(self, *args, eps_scale=1.0, sample_ids=None, **options):
        if eps_scale:
            if self._patience == 0:
                raise RuntimeError("killed")
            self._patience -= 1
            self._asked += list(sample_ids)
        return super().run(*args, eps_scale=eps_scale, sample_ids=sample_ids, **options)


def evaluate(folder, report_dir, images, attack: Attack, net=None, batch_size=8, verb="test", **options):
    x, y = images(40)
    options = {"report_dir": str(report_dir), "resume": True, **options}
    evaluation = RobustEvaluation({"pgd": attack}, **options)
    trainer = make_trainer(callbacks=[evaluation], default_root_dir=folder)
    module = Classifier(net or trained_net())
    getattr(trainer, verb)(module, loader(x, y, batch_size=batch_size), verbose=False)
    return evaluation


def report_of(folder: Path) -> dict:
    report = json.loads((folder / "report.json").read_text())
    for attack in report["attacks"].values():
        del attack["seconds"]
    return report


@pytest.mark.parametrize("verb", ["test", "validate"])
def test_a_second_start_does_the_rest(tmp_path, images, verb):
    evaluate(tmp_path, tmp_path / "whole", images, Counting(), verb=verb)
    with pytest.raises(RuntimeError, match="killed"):
        evaluate(tmp_path, tmp_path / "killed", images, first := Counting(patience=3), verb=verb)
    assert (tmp_path / "killed" / "progress" / "rank0.jsonl").exists()
    evaluate(tmp_path, tmp_path / "killed", images, second := Counting(), batch_size=5, verb=verb)
    whole, killed = report_of(tmp_path / "whole"), report_of(tmp_path / "killed")
    assert killed == whole
    assert not set(first._asked) & set(second._asked)
    assert len(first._asked) + len(second._asked) == round(whole["clean_acc"] * 40)
    assert (tmp_path / "killed" / "examples.png").read_bytes() == (tmp_path / "whole" / "examples.png").read_bytes()
    assert not (tmp_path / "killed" / "progress").exists()


def test_a_finished_evaluation_begins_anew(tmp_path, images):
    evaluate(tmp_path, tmp_path / "r", images, first := Counting())
    evaluate(tmp_path, tmp_path / "r", images, second := Counting())
    assert first._asked == second._asked


@pytest.mark.parametrize("changed", ["weights", "attacks", "seed", "data"])
def test_what_decides_the_verdicts_starts_afresh(tmp_path, images, changed, capsys):
    with pytest.raises(RuntimeError, match="killed"):
        evaluate(tmp_path, tmp_path / "r", images, Counting(patience=2))
    net = trained_net()
    attack = Counting(seed=1) if changed == "seed" else Counting()
    if changed == "weights":
        net.head.bias.data[0] += 0.01
    if changed == "attacks":
        attack.step_size = 0.02

    def other(count):
        x, y = images(count)
        return (x + (0.001 if changed == "data" else 0)).clamp(0, 1), y

    evaluation = evaluate(tmp_path, tmp_path / "r", other, attack, net)
    assert len(attack._asked) == evaluation.result.num_clean
    assert evaluation.result.num_samples == 40


def test_without_resume_there_is_no_journal(tmp_path, images):
    with pytest.raises(RuntimeError, match="killed"):
        evaluate(tmp_path, tmp_path / "r", images, Counting(patience=3), resume=False)
    assert not (tmp_path / "r").exists()


def test_in_fit_there_is_no_journal(tmp_path, images):
    x, y = images(16)
    evaluation = RobustEvaluation({"pgd": Counting(patience=1)}, report_dir=str(tmp_path / "r"), resume=True)
    trainer = make_trainer(callbacks=[evaluation], default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(Classifier(), loader(x, y), loader(x, y))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("option", ["resume", "save_examples"])
def test_a_journal_needs_a_folder(option):
    with pytest.raises(UsageError, match=f"{option}=True needs a folder"):
        RobustEvaluation(**{option: True})


CONFIG = {
    "seed_everything": 0,
    "model": {"class_path": "examples.classifiers.SmallConvNet", "init_args": {"image_size": 8}},
    "data": {"class_path": "robustdist.data.DigitsDataModule", "init_args": {"batch_size": 8}},
    "trainer": {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            {
                "class_path": "robustdist.callbacks.RobustEvaluation",
                "init_args": {
                    "attacks": {
                        "pgd": {
                            "class_path": "robustdist.attacks.PGD",
                            "init_args": {"eps": 0.1, "steps": 30, "restarts": 5},
                        }
                    }
                },
            }
        ],
    },
}


def command(folder: Path, checkpoint: Path, report: str, processes: int) -> list[str]:
    parallel = ["--trainer.devices", str(processes), "--trainer.strategy", "auto" if processes == 1 else "ddp_fork"]
    return [
        *(sys.executable, "-m", "robustdist", "evaluate", "--config", str(folder / "c.yaml"), *parallel),
        *("--ckpt_path", str(checkpoint), "--report_dir", str(folder / report), "--thorough", "false"),
        *("--save_examples", "true"),
    ]


def finished_images(folder: Path) -> int:
    lines = [line for path in folder.glob("rank*.jsonl") for line in path.read_text().splitlines() if line]
    return sum(len(json.loads(line)["rows"]) for line in lines if line.endswith("}"))


@pytest.mark.slow
@pytest.mark.standalone
@pytest.mark.timeout(600)
def test_a_process_that_is_killed_goes_on_with_another_number_of_processes(tmp_path, monkeypatch):
    import lightning.pytorch as pl

    from examples.classifiers import SmallConvNet

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    pl.seed_everything(0)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, logger=False, default_root_dir=tmp_path)
    from robustdist.data import DigitsDataModule

    module = SmallConvNet(image_size=8)
    trainer.fit(module, datamodule=DigitsDataModule())
    trainer.save_checkpoint(checkpoint := tmp_path / "m.ckpt")

    subprocess.run(command(tmp_path, checkpoint, "whole", 1), check=True, cwd=tmp_path, capture_output=True)

    log = (tmp_path / "log").open("w")
    started = subprocess.Popen(
        command(tmp_path, checkpoint, "killed", 2), cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
    )
    progress = tmp_path / "killed" / "progress"
    deadline = time.monotonic() + 300
    while finished_images(progress) < 60:
        assert started.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    assert not (tmp_path / "killed" / "report.json").exists()
    assert 60 <= finished_images(progress) < 200

    again = subprocess.run(
        command(tmp_path, checkpoint, "killed", 1), check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert "finished images of this evaluation: going on" in again.stdout + again.stderr
    whole, killed = report_of(tmp_path / "whole"), report_of(tmp_path / "killed")
    assert killed == whole
    assert whole["num_samples"] == 200
    assert not progress.exists()
    saved = [(tmp_path / name / whole["saved"]["file"]).read_bytes() for name in ("whole", "killed")]
    assert saved[0] == saved[1]
    assert whole["saved"]["num_right"] == round(whole["robust_acc"] * 200)
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 2
